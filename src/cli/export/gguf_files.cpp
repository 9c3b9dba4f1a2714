#include <algorithm>
#include <cctype>
#include <filesystem>

#include "base/files.h"
#include "base/log.h"
#include "cli/export/companions.h"
#include "cli/export/exported.h"
#include "cli/shown_weights.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/weights.h"
#include "models/adapters/adapters.h"
#include "models/gguf/gguf_export.h"
#include "models/gguf/gguf_metadata.h"
#include "models/gguf/gguf_tokenizer.h"
#include "models/hub/config_json.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

/// Families by whose name in a file's llama.cpp takes tokens of theirs otherwise than files say.
bool changes_tokens(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name.find("phi-3") != std::string::npos || name.find("phi3") != std::string::npos ||
         name.find("modern-bert") != std::string::npos;
}

models::GgufMetadata begin_metadata(const models::GgufLayout& layout, const char* type,
                                    const std::string& file) {
  models::GgufMetadata out;
  out.set("general.architecture", layout.family().architecture);
  out.set("general.type", type);
  if (const std::string name = fs::path(file).stem().string(); !changes_tokens(name))
    out.set("general.name", models::GgufValue(name));
  return out;
}

/// The tokenizer of an exported folder, or that of bytes.
models::GgufTokenizer tokenizer_in(const fs::path& folder, const std::string& config, const Exported& what,
                                   const models::GptConfig& model) {
  models::GgufTokenizer out;
  const auto there = [&](const std::string& name) { return fs::exists(folder / name); };
  if (there("tokenizer.json")) out.json = data::read_model_file((folder / "tokenizer.json").string());
  for (const char* name : data::sentencepiece_files)
    if (out.json.empty() && there(name)) out.sentencepiece = read_file(folder / name);
  out.bytes = what.reader.manifest().data.tokenizer == "byte";
  out.beside = [=](const std::string& name) {
    return name == "config.json" ? config : there(name) ? read_file(folder / name) : std::string();
  };
  out.ids = model.vocab_size, out.token_types = model.token_types, out.of_encoder = model.has_encoder();
  return out;
}

std::uint64_t write_model_as_gguf(const Exported& what, const fs::path& folder, const std::string& name,
                                  device::Device& device) {
  models::GptConfig plain = what.options;
  plain.adapter = {};
  const models::GgufLayout layout(plain);
  const fs::path beside = folder / "beside";
  fs::create_directory(beside);
  const std::string config = copy_companions(what.reader, plain.vocab_size, beside);
  models::GgufMetadata metadata = begin_metadata(layout, "model", name);
  models::describe_tokenizer(metadata, tokenizer_in(beside, config, what, layout.config()));
  for (const std::string& note : models::gguf_notes(layout.config())) log_warning(note);
  models::Gpt model(plain), adapted(what.options);
  model.assign_names(), adapted.assign_names();
  engine::CheckpointWeights weights(what.reader, device);
  weights.check(adapted.parameters());
  models::MergedWeights merged(weights, what.options, device);
  const bool adapter = what.options.adapter.type != config::AdapterType::none;
  ShownWeights shown(adapter ? static_cast<nn::WeightSource&>(merged) : weights, model.parameters(),
                     "exporting");
  return models::export_to_gguf(folder / name, std::move(metadata), layout, model.parameters(), shown, device,
                                *what.gguf);
}

}  // namespace

std::uint64_t write_gguf(const Exported& what, bool adapter, const fs::path& folder, const std::string& name,
                         device::Device& device) {
  if (!adapter) return write_model_as_gguf(what, folder, name, device);
  std::uint64_t bytes = 0;
  with_published_adapter(
      what, device, [&](const models::Gpt& of, nn::WeightSource& from, const config::Adapter&) {
        const models::GgufLayout layout(of.config());
        bytes = models::export_lora_to_gguf(folder / name, begin_metadata(layout, "adapter", name), layout,
                                            of.parameters(), from, device, *what.gguf);
      });
  return bytes;
}

}  // namespace sherd::cli
