#include "engine/checkpoint_data.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>

#include "base/crc32c.h"
#include "engine/checkpoint.h"

namespace sherd::engine {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void wrong(const std::string& path, const std::string& what, const std::string& value) {
  fail(ErrorKind::data, path, " is damaged: its ", what, " cannot be ", value,
       "; resume from an earlier checkpoint by naming its tag");
}

/// A count in [0, most], 0 where the key is absent.
std::int64_t count_in(const Json& json, const char* key, std::int64_t most, const std::string& path) {
  if (!json.contains(key)) return 0;
  const Json& value = json.at(key);
  const bool fits =
      value.is_number_unsigned() && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most);
  if (!fits) wrong(path, cat("data.", key), value.dump());
  return value.get<std::int64_t>();
}

std::int64_t count_in(const std::string& text, const char* key, std::int64_t most, const std::string& path) {
  std::int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > most)
    wrong(path, cat("client.", key), cat("'", text, "'"));
  return value;
}

constexpr std::int64_t most_of_any = std::numeric_limits<std::int64_t>::max();

}  // namespace

DataRecord DataRecord::of(const TokenData& tokens) {
  DataRecord out;
  out.tokenizer = tokens.tokenizer;
  out.vocab_size = tokens.vocab_size;
  out.tokens = tokens.dataset->tokens();
  out.sequences = tokens.dataset->sequences();
  out.fingerprint = tokens.dataset->fingerprint();
  return out;
}

std::string DataRecord::to_json() const {
  Json json = Json::object();
  if (position) json["position"] = *position;
  if (!tokenizer.empty()) json["tokenizer"] = tokenizer;
  if (vocab_size > 0) json["vocab_size"] = vocab_size;
  if (tokens > 0) json["tokens"] = tokens, json["sequences"] = sequences, json["fingerprint"] = fingerprint;
  return json.dump();
}

DataRecord DataRecord::from_json(const std::string& text, const std::string& path) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) wrong(path, "data", text);
  DataRecord out;
  if (json.contains("position")) out.position = count_in(json, "position", data::LoaderPosition::most, path);
  if (json.contains("tokenizer")) {
    if (!json.at("tokenizer").is_string()) wrong(path, "data.tokenizer", json.at("tokenizer").dump());
    out.tokenizer = json.at("tokenizer").get<std::string>();
  }
  out.vocab_size = count_in(json, "vocab_size", most_of_any, path);
  out.tokens = count_in(json, "tokens", most_of_any, path);
  out.sequences = count_in(json, "sequences", most_of_any, path);
  out.fingerprint = static_cast<std::uint32_t>(count_in(json, "fingerprint", 0xffffffff, path));
  return out;
}

DataRecord DataRecord::from_client(const std::map<std::string, std::string>& client,
                                   const std::string& path) {
  DataRecord out;
  const auto position = client.find("data_position"), tokenizer = client.find("tokenizer"),
             vocab_size = client.find("vocab_size");
  // Other programs may have strings of these names; `sherd train` wrote all three.
  if (position == client.end() || tokenizer == client.end() || vocab_size == client.end()) return out;
  out.position = count_in(position->second, "data_position", data::LoaderPosition::most, path);
  out.tokenizer = tokenizer->second;
  out.vocab_size = count_in(vocab_size->second, "vocab_size", most_of_any, path);
  return out;
}

namespace {

std::string_view kind_of(std::string_view tokenizer) {
  return tokenizer.substr(0, tokenizer.find(':'));
}

std::string described(const DataRecord& data, const std::optional<FileChecksum>& model) {
  return cat(data.tokenizer.empty() ? "an unknown one" : cat("'", data.tokenizer, "'"), " of ",
             data.vocab_size, " ids",
             model ? cat(" (a model of ", model->bytes, " bytes with CRC-32C ", model->crc32c, ")") : "");
}

std::optional<FileChecksum> model_of(const Manifest& manifest) {
  const auto copy = manifest.files.find(tokenizer_file);
  return copy == manifest.files.end() ? std::nullopt : std::optional(copy->second);
}

std::optional<FileChecksum> model_of(const TokenData& tokens) {
  const std::string& bytes = tokens.tokenizer_model;
  if (bytes.empty()) return std::nullopt;
  return FileChecksum{bytes.size(), crc32c(bytes.data(), bytes.size())};
}

}  // namespace

void require_same_tokenizer(const CheckpointReader& reader, const TokenData& tokens) {
  const DataRecord &saved = reader.manifest().data, here = DataRecord::of(tokens);
  const std::optional<FileChecksum> saved_model = model_of(reader.manifest()), model = model_of(tokens);
  const bool other_size = saved.vocab_size > 0 && saved.vocab_size != here.vocab_size;
  const bool both_named = !saved.tokenizer.empty() && !here.tokenizer.empty();
  const bool other_kind = both_named && kind_of(saved.tokenizer) != kind_of(here.tokenizer);
  if (!other_size && !other_kind && !(saved_model && model && *saved_model != *model)) return;
  fail(ErrorKind::data, "checkpoint ", reader.folder().string(), " was trained on tokens of ",
       described(saved, saved_model), ", and the data here, ", tokens.dataset->prefix(), ", are tokens of ",
       described(here, model), ": set data.path to tokens of the checkpoint's tokenizer",
       saved_model ? cat(" (`sherd prepare --tokenizer spm:", (reader.folder() / tokenizer_file).string(),
                         "` makes them)")
                   : "",
       ", or train a new model into another folder");
}

namespace {

/// Whether a key leaves what is trained as it is, to the bit: where things lie, how much memory and time they
/// may take, what is told and when. The tokenizer and the dataset are compared by what they hold.
bool is_without_effect(std::string_view key) {
  constexpr std::array prefixes{"zero_optimization.", "aio.",      "activation_checkpointing.",
                                "parallel.",          "data.path", "data.tokenizer"};
  constexpr std::array keys{
      "steps_per_print",  "wall_clock_breakdown",           "memory_breakdown", "dump_state", "log_level",
      "model.vocab_size", "model.pad_vocab_to_multiple_of", "model.init_std"};
  constexpr std::array of_training{"training.seed", "training.moments_dtype"};
  constexpr std::array of_device{"device.tf32", "device.fused_gelu"};
  const auto is = [&](const char* other) { return key == other; };
  if (key.starts_with("training.")) return std::none_of(of_training.begin(), of_training.end(), is);
  if (key.starts_with("device.")) return std::none_of(of_device.begin(), of_device.end(), is);
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* prefix) { return key.starts_with(prefix); }) ||
         std::any_of(keys.begin(), keys.end(), is);
}

std::map<std::string, std::string> effective_keys(const config::Config& config) {
  std::map<std::string, std::string> out;
  for (const auto& [key, value] : config::flat_dump(config))
    if (!is_without_effect(key)) out[key] = value;
  return out;
}

void add_changed_keys(const config::Config& saved, const config::Config& config,
                      std::vector<std::string>& out) {
  const auto there = effective_keys(saved), here = effective_keys(config);
  const auto value_in = [](const auto& keys, const std::string& key) {
    const auto found = keys.find(key);
    return found == keys.end() ? "not set" : found->second;
  };
  for (const auto& [key, value] : there)
    if (value_in(here, key) != value)
      out.push_back(cat(key, " was ", value, " and is ", value_in(here, key)));
  for (const auto& [key, value] : here)
    if (!there.contains(key)) out.push_back(cat(key, " was not set and is ", value));
}

}  // namespace

std::vector<std::string> changes_since(const CheckpointReader& reader, const config::Config& config,
                                       const TokenData* tokens) {
  std::vector<std::string> out;
  const DataRecord& saved = reader.manifest().data;
  if (tokens && saved.tokens > 0) {
    const DataRecord here = DataRecord::of(*tokens);
    if (std::tie(saved.tokens, saved.sequences, saved.fingerprint) !=
        std::tie(here.tokens, here.sequences, here.fingerprint))
      out.push_back(cat("the dataset had ", saved.tokens, " tokens in ", saved.sequences,
                        " sequences (fingerprint ", saved.fingerprint, ") and has ", here.tokens, " in ",
                        here.sequences, " (", here.fingerprint, ")"));
  }
  if (tokens && kind_of(saved.tokenizer) == "spm" && !(model_of(reader.manifest()) && model_of(*tokens)))
    out.push_back(cat("whether its tokenizer, '", saved.tokenizer, "', is '", tokens->tokenizer,
                      "' cannot be told, as not both model files are there"));
  try {
    add_changed_keys(config::parse_text(reader.manifest().config, "the checkpoint's configuration"), config,
                     out);
  } catch (const Error& error) {
    out.push_back(
        cat("its configuration cannot be compared with this one: ", error.what()));  // of another version
  }
  return out;
}

}  // namespace sherd::engine
