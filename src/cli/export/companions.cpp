#include "cli/export/companions.h"

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/log.h"
#include "cli/inference/exported_tokenizer.h"
#include "cli/weights.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/format.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

/// The ids of the model that a config.json describes; 0: it does not say.
std::int64_t ids_in(const std::string& config) {
  const auto object = nlohmann::json::parse(config, nullptr, /*allow_exceptions=*/false);
  const bool says = object.is_object() && object.contains("vocab_size") && object["vocab_size"].is_number();
  return says ? object["vocab_size"].get<std::int64_t>() : 0;
}

}  // namespace

std::string copy_companions(const engine::CheckpointReader& reader, std::int64_t ids, const fs::path& to) {
  const std::string prefix = companion_prefix;
  const engine::Manifest& manifest = reader.manifest();
  std::string config;
  bool tokenizer = false;
  for (const auto& [file, checksum] : manifest.files) {
    if (!file.starts_with(prefix)) continue;
    const std::string name = file.substr(prefix.size());
    if (name == "config.json")
      config = read_file(reader.folder() / file);
    else
      fs::copy_file(reader.folder() / file, to / name);
    tokenizer = tokenizer || name.starts_with("tokenizer") || name == "vocab.json";
  }
  const std::string copy = manifest.tokenizer_copy();
  const auto own = manifest.files.find(copy), came = manifest.files.find(prefix + copy);
  const bool kept = own != manifest.files.end();
  const bool same = kept && (!tokenizer || (came != manifest.files.end() && own->second == came->second));
  if (kept && !same && copy == engine::tokenizer_json_file && 0 < ids_in(config) && ids_in(config) < ids) {
    for (const char* file : {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
                             "added_tokens.json", "special_tokens_map.json"})
      fs::remove(to / file);
    fs::copy_file(reader.folder() / copy, to / copy);
    return config;
  }
  if (tokenizer && !same && !manifest.data.tokenizer.empty())
    log_warning("the run's data were made with '", manifest.data.tokenizer,
                "', and the tokenizer that is exported is the one that the weights came with: its text means "
                "other ids");
  if (!tokenizer && kept) {
    fs::copy_file(reader.folder() / copy, to / copy);
    tokenizer = true;
  }
  if (same) write_tokenizer_settings(reader, to);
  if (!tokenizer)
    log_warning("checkpoint ", reader.folder().string(), " holds no tokenizer files",
                manifest.data.tokenizer == "byte" ? ", as its ids are bytes" : "",
                ": transformers will need some beside the weights");
  // A model of Sherd's own says which id ends a document; transformers would take its class's ids.
  if (config.empty() && !manifest.data.tokenizer.empty() && manifest.data.vocab_size > 0)
    config = cat("{\"bos_token_id\": null, \"eos_token_id\": ", tokenizer_of(reader)->end_of_document(),
                 ", \"pad_token_id\": null}");
  return config;
}

}  // namespace sherd::cli
