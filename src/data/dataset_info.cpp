#include "data/dataset_info.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "data/indexed_dataset.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

constexpr const char* format_name = "sherd dataset";

fs::path folder_of(const std::string& prefix) {
  return fs::path(prefix).parent_path();
}

std::string to_relative(const std::string& spec, const std::string& prefix) {
  const fs::path model = model_file_of(spec);
  if (model.empty() || model.parent_path() != folder_of(prefix)) return spec;
  return with_model_file(spec, model.filename().string());
}

std::string to_full(const std::string& spec, const std::string& prefix) {
  const fs::path model = model_file_of(spec);
  if (model.empty() || model.is_absolute() || model.has_parent_path()) return spec;
  return with_model_file(spec, (folder_of(prefix) / model).string());
}

/// The integer under `key`, from `least` to `most`.
std::int64_t count_of(const ordered_json& json, const char* key, std::int64_t least, std::int64_t most,
                      const fs::path& path) {
  const ordered_json& value = json.at(key);
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() ||
       value.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most)
    fail(ErrorKind::data, "'", path.string(), "' is damaged ('", key, "' is no integer from ", least, " to ",
         most, "); run 'sherd prepare' again");
  return value.get<std::int64_t>();
}

}  // namespace

double unigram_entropy(std::span<const std::int64_t> counts) {
  std::int64_t total = 0;
  double weighted = 0;
  for (const std::int64_t count : counts) {
    total += count;
    if (count > 0) weighted += static_cast<double>(count) * std::log(static_cast<double>(count));
  }
  if (total == 0) return 0;
  const auto n = static_cast<double>(total);
  return std::log(n) - weighted / n;
}

void write_dataset_info(const std::string& prefix, const DatasetInfo& info) {
  ordered_json json = {{"format", format_name},
                       {"version", 1},
                       {"tokenizer", to_relative(info.tokenizer, prefix)},
                       {"vocab_size", info.vocab_size},
                       {"end_of_document", info.end_of_document},
                       {"token_type", info.token_type},
                       {"tokens", info.tokens},
                       {"sequences", info.sequences},
                       {"documents", info.documents},
                       {"text_bytes", info.text_bytes},
                       {"unigram_entropy_nats", info.unigram_entropy}};
  if (info.masked_tokens > 0) json["masked_tokens"] = info.masked_tokens;
  if (!info.chat_template.empty()) json["chat_template"] = info.chat_template;
  if (info.seq2seq) json["seq2seq"] = true;
  if (!info.labels.empty()) json["labels"] = info.labels;
  if (info.labels_of_tokens) json["labels_of"] = "tokens";
  if (info.preferences != Preferences::none)
    json["preferences"] = info.preferences == Preferences::pairs ? "pairs" : "labels";
  write_file_atomically(info_path(prefix), json.dump(2) + "\n");
}

std::optional<DatasetInfo> read_dataset_info(const std::string& prefix) {
  const fs::path path = info_path(prefix);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  std::ifstream in(path, std::ios::binary);
  if (!in)
    fail(ErrorKind::io, "cannot read '", path.string(), "'; make it readable, or run 'sherd prepare' again");
  try {
    const auto json = ordered_json::parse(in);
    if (json.at("format") != format_name || json.at("version") != 1)
      fail(ErrorKind::data, "'", path.string(),
           "' describes no dataset of this version; run 'sherd prepare' again");
    constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
    constexpr std::int64_t any_id = std::numeric_limits<std::int32_t>::max();
    const auto count = [&](const char* key, std::int64_t least, std::int64_t most) {
      return count_of(json, key, least, most, path);
    };
    DatasetInfo info;
    info.tokenizer = to_full(json.at("tokenizer").get<std::string>(), prefix);
    info.vocab_size = count("vocab_size", 1, any_id);
    info.end_of_document = static_cast<std::int32_t>(count("end_of_document", 0, info.vocab_size - 1));
    info.token_type = json.at("token_type").get<std::string>();
    info.tokens = count("tokens", 0, any);
    info.sequences = count("sequences", 0, any);
    info.documents = count("documents", 0, any);
    info.masked_tokens = json.contains("masked_tokens") ? count("masked_tokens", 0, info.tokens) : 0;
    info.chat_template = json.value("chat_template", "");
    info.seq2seq = json.value("seq2seq", false);
    info.labels = json.value("labels", std::vector<std::string>());
    info.labels_of_tokens = json.value("labels_of", "texts") == "tokens";
    const std::string preferences = json.value("preferences", "");
    info.preferences = preferences == "pairs"    ? Preferences::pairs
                       : preferences == "labels" ? Preferences::labels
                                                 : Preferences::none;
    info.text_bytes = count("text_bytes", 0, any);
    info.unigram_entropy = json.at("unigram_entropy_nats").get<double>();
    return info;
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::data, "'", path.string(), "' is damaged (", excerpt(error.what(), 300),
         "); run 'sherd prepare' again");
  }
}

}  // namespace sherd::data
