#include "cli/weights.h"

#include <filesystem>

#include "base/excerpt.h"
#include "base/read_file.h"
#include "config/hugging_face.h"
#include "models/hugging_face_weights.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

config::PublishedModel published_in(const std::string& folder) {
  const std::string name = (fs::path(folder) / "config.json").string();
  return config::from_hugging_face(read_file(name), name);
}

}  // namespace

bool holds_checkpoints(const std::string& folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / "latest", error) ||
         fs::exists(fs::path(folder) / "manifest.json", error);
}

bool is_hugging_face(const std::string& folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / "config.json", error) && !holds_checkpoints(folder);
}

std::string model_section(const std::string& folder) {
  if (is_hugging_face(folder)) return config::section_of(published_in(folder).model);
  if (!holds_checkpoints(folder))
    fail(ErrorKind::io, "training.init_from: '", excerpt(folder, 300),
         fs::is_directory(folder)
             ? "' holds neither a model of Hugging Face's (config.json and model.safetensors) nor checkpoints"
             : "' is no folder here: nothing is downloaded, so give the path of one that was");
  const engine::CheckpointReader reader(engine::checkpoint_folder(folder));
  const config::Config saved = config::parse_text(
      reader.manifest().config, cat("the configuration in ", (reader.folder() / "manifest.json").string()));
  if (!saved.model)
    fail(ErrorKind::config, "training.init_from: checkpoint ", reader.folder().string(),
         " is of a model of its program's own; load it there, by Engine::load_weights()");
  return config::section_of(*saved.model);
}

Weights::Weights(const std::string& folder, const config::Model& model, const models::GptOptions& options,
                 device::Device& device)
    : folder_(folder) {
  if (is_hugging_face(folder)) {
    source_ = std::make_unique<models::HuggingFaceWeights>(
        folder, models::HuggingFaceLayout(options, config::published_as(model)));
    notes_ = published_in(folder).notes;
    return;
  }
  reader_ = std::make_unique<engine::CheckpointReader>(engine::checkpoint_folder(folder));
  source_ = std::make_unique<engine::CheckpointWeights>(*reader_, device);
}

void Weights::verify_share(int rank, int ranks) const {
  if (reader_) reader_->verify_share(rank, ranks);
}

engine::ExtraFiles Weights::companions() const {
  if (!reader_) return companion_files(folder_);
  engine::ExtraFiles out;
  for (const auto& [name, checksum] : reader_->manifest().files)
    if (name.starts_with(companion_prefix)) out[name] = read_file(reader_->folder() / name);
  return out;
}

std::shared_ptr<const data::Tokenizer> tokenizer_of(const engine::CheckpointReader& reader) {
  const engine::Manifest& manifest = reader.manifest();
  if (manifest.data.tokenizer.empty() || manifest.data.vocab_size == 0)
    fail(
        ErrorKind::data, "checkpoint ", reader.folder().string(),
        " does not name its tokenizer: it was not trained on a dataset of `sherd prepare`, nor imported with "
        "a tokenizer that is read here. `sherd export` makes files of it that transformers generates with");
  const std::string copy = manifest.tokenizer_copy();
  if (copy.empty()) return data::make_tokenizer(manifest.data.tokenizer);
  return data::make_tokenizer(
      data::with_model_file(manifest.data.tokenizer, (reader.folder() / copy).string()));
}

std::optional<DType> published_dtype(const std::string& folder) {
  return parse_dtype(published_in(folder).dtype);
}

engine::ExtraFiles companion_files(const std::string& folder) {
  engine::ExtraFiles out;
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"}) {
    std::error_code error;
    const fs::path path = fs::path(folder) / name;
    if (fs::exists(path, error)) out[cat(companion_prefix, name)] = read_file(path);
  }
  return out;
}

}  // namespace sherd::cli
