#include "cli/weights.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/other_head.h"
#include "data/hugging_face/files_beside.h"
#include "data/templates/published_template.h"
#include "engine/checkpoint/same_run.h"
#include "models/adapters/adapters.h"
#include "models/adapters/initial_adapter.h"
#include "models/adapters/prompt_weights.h"
#include "models/hub/adapter_config.h"
#include "models/hub/adapter_names.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/adapter_targets.h"
#include "models/hub/config_json.h"
#include "models/hub/grown_vocabulary.h"
#include "models/hub/hugging_face_weights.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

models::PublishedModel published_in(const std::string& folder) {
  const std::string name = (fs::path(folder) / "config.json").string();
  return models::from_hugging_face(read_file(name), name);
}

constexpr const char* peft_config = "adapter_config.json";

/// Whether there are parameters of an adapter in it.
bool holds_adapter(const engine::CheckpointReader& reader) {
  const auto& shapes = reader.manifest().shapes;
  return std::any_of(shapes.begin(), shapes.end(),
                     [](const auto& shape) { return models::is_adapter(shape.first); });
}

/// A file that the weights came with, where the run kept their tokenizer; empty: none.
std::string companion(const engine::CheckpointReader& reader, const std::string& name) {
  const engine::Manifest& manifest = reader.manifest();
  const std::string copy = manifest.tokenizer_copy(), file = companion_prefix + name;
  const auto own = manifest.files.find(copy), came = manifest.files.find(companion_prefix + copy);
  const bool same =
      own != manifest.files.end() && came != manifest.files.end() && own->second == came->second;
  return same && manifest.files.contains(file) ? read_file(reader.folder() / file) : std::string();
}

/// Whether the folder is one of PEFT's.
bool is_peft(const std::string& folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / peft_config, error);
}

/// Throws for a folder that holds neither checkpoints nor `other`.
void require_checkpoints(const char* key, const std::string& folder, const char* other) {
  if (holds_checkpoints(folder)) return;
  const bool there = fs::is_directory(folder);
  fail(ErrorKind::io, key, ": '", excerpt(folder, 300),
       there ? cat("' holds neither ", other, " nor checkpoints")
             : "' is no folder here: nothing is downloaded, so give the path of one that was");
}

/// In what a folder's config.json says that weights are kept, "bitsandbytes nf4"; empty: in no few bits.
std::string quantization_in(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_regular_file(folder / "config.json", error)) return {};
  const auto config = nlohmann::json::parse(read_file(folder / "config.json"), nullptr, false);
  if (!config.is_object() || !config.contains("quantization_config")) return {};
  const nlohmann::json& how = config["quantization_config"];
  if (!how.is_object()) return {};
  const auto text = [&](const char* key) {
    return how.contains(key) && how[key].is_string() ? how[key].get<std::string>() : std::string();
  };
  const bool eight = how.contains("load_in_8bit") && how["load_in_8bit"] == true;
  const std::string detail = eight ? "8 bits" : text("bnb_4bit_quant_type");
  return detail.empty() ? text("quant_method") : cat(text("quant_method"), " ", detail);
}

/// Whether a path is that of the model which Hugging Face calls so: it has a part of that name, as folders of
/// its cache have it, too ("models--org--name").
bool is_called(const fs::path& path, const std::string& name) {
  return std::any_of(path.begin(), path.end(), [&](const fs::path& part) {
    return part == name || part.string().ends_with("--" + name);
  });
}

/// Notes on how the base that PEFT's file names differs from the one in `base`; none where they are the same.
std::vector<std::string> other_base(const std::string& file, const fs::path& base,
                                    const config::Adapter& adapter) {
  std::vector<std::string> out;
  const std::string named = models::base_in(read_file(file), file);
  std::error_code error;
  const fs::path there = fs::weakly_canonical(named, error), here = fs::weakly_canonical(base, error);
  const std::string name = fs::path(named).lexically_normal().filename().string();
  if (named.empty() || there == here) return out;
  if (!name.empty() && !is_called(here, name))
    out.push_back(cat(file, ": the adapter was trained on '", excerpt(named, 200), "', and the base is '",
                      excerpt(here.string(), 200), "': beside other weights it makes no sense"));
  const bool known = fs::is_directory(there, error);
  const std::string kept = known                              ? quantization_in(there)
                           : named.find("4bit") != named.npos ? "4 bits"
                                                              : "",
                    keeps = quantization_in(here);
  if (!kept.empty() && (known ? kept != keeps : keeps.empty()) &&
      adapter.base_format == StoredFormat::compute)
    out.push_back(cat(file, ": the adapter was trained beside weights in ", kept, ", and those here are in ",
                      keeps.empty() ? "full" : keeps,
                      ": training.adapter.base_format keeps them in few bits, too"));
  return out;
}

bool is_of_base(const std::string& parameter) {
  return !models::is_adapter(parameter);
}

/// model_section() and, of a checkpoint of a run with an adapter, adapter_section(): what a run that begins
/// from it begins with.
std::string sections_of(const std::string& folder) {
  std::string model = model_section(folder);
  if (is_hugging_face(folder) || !holds_adapter(engine::CheckpointReader(engine::checkpoint_folder(folder))))
    return model;
  auto both = nlohmann::ordered_json::parse(model);
  both.update(nlohmann::ordered_json::parse(adapter_section(folder)));
  return both.dump(2);
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

config::Config configuration_of(const engine::CheckpointReader& reader,
                                const std::vector<std::string>& overrides) {
  return config::parse_text(reader.manifest().config,
                            cat("the configuration in ", (reader.folder() / "manifest.json").string()),
                            overrides);
}

std::string model_section(const std::string& folder) {
  if (is_hugging_face(folder)) return config::section_of(published_in(folder).model);
  require_checkpoints("training.init_from", folder,
                      "a model of Hugging Face's (config.json and model.safetensors)");
  const engine::CheckpointReader reader(engine::checkpoint_folder(folder));
  const config::Config saved = configuration_of(reader);
  if (!saved.model)
    fail(ErrorKind::config, "training.init_from: checkpoint ", reader.folder().string(),
         " is of a model of its program's own; load it there, by Engine::load_weights()");
  return config::section_of(*saved.model);
}

std::string adapter_section(const std::string& folder) {
  if (is_peft(folder)) {
    const std::string name = (fs::path(folder) / peft_config).string();
    const std::string text = read_file(name);
    return config::section_of(models::is_adapter_hub(text, name) ? models::from_adapter_hub(text, name)
                                                                 : models::from_peft(text, name));
  }
  require_checkpoints("training.adapter.init_from", folder,
                      "an adapter of PEFT's (adapter_config.json and adapter_model.safetensors)");
  const engine::CheckpointReader reader(engine::checkpoint_folder(folder));
  config::Adapter adapter = configuration_of(reader).training.adapter;
  if (adapter.type == config::AdapterType::none)
    fail(ErrorKind::config, "training.adapter.init_from: checkpoint ", reader.folder().string(),
         " is of a run without an adapter; name it with training.init_from");
  adapter.init_from.clear(), adapter.save_base = true;
  return config::section_of(adapter);
}

config::Config ConfigFiles::parse(const std::vector<std::string>& more) const {
  for (const std::string& path : paths)
    if (std::error_code absent; path.find('=') != std::string::npos && !std::filesystem::exists(path, absent))
      fail(ErrorKind::usage, "there is no file '", excerpt(path),
           "'; each key that is set has its own --set: --set ", excerpt(path));
  std::vector<std::string> all = overrides;
  all.insert(all.end(), more.begin(), more.end());
  // A run that is resumed needs the folders no more from which it began.
  const auto of = [&](std::string (*section)(const std::string&)) {
    return [this, section](const std::string& init_from, const std::string& save_dir) {
      return section(resumes && holds_checkpoints(save_dir) ? save_dir : init_from);
    };
  };
  return config::parse_files(paths, all, of(sections_of), of(adapter_section));
}

void ConfigFiles::in_their_words(const std::function<void()>& run) const {
  try {
    run();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    throw Error(error.kind(), config::in_given_keys(error.what(), paths, overrides));
  }
}

Weights::Weights(const std::string& folder, const models::GptConfig& options, device::Device& device,
                 const config::Adapter& adapter, std::vector<std::int32_t> prompt_ids)
    : folder_(folder) {
  open(options, device, adapter, std::move(prompt_ids));
}

Weights::Weights(BaseAlone, const std::string& folder, const models::GptConfig& options,
                 device::Device& device, const config::Adapter& adapter)
    : folder_(folder), base_alone_(true) {
  open(options, device, adapter, {});
}

Weights Weights::base_alone(const std::string& folder, const models::GptConfig& options,
                            device::Device& device, const config::Adapter& adapter) {
  return {BaseAlone(), folder, options, device, adapter};
}

void Weights::open(const models::GptConfig& options, device::Device& device, const config::Adapter& adapter,
                   std::vector<std::int32_t> prompt_ids) {
  const std::string& folder = folder_;
  if (is_hugging_face(folder)) {
    const models::PublishedModel published = published_in(folder);
    models::GptConfig there = options;
    there.vocab_size = std::min(options.vocab_size, published.model.vocab_size);
    source_ = std::make_unique<models::HuggingFaceWeights>(folder, models::HuggingFaceLayout(there));
    grow(there, options, device);
    for (const std::string& note : published.notes) notes_.push_back(cat(folder, "/config.json: ", note));
    if (published.model.scores_texts() && scores_others(options, published.model))
      source_ = without_scores(std::move(source_), names_in(options, published.model));
  } else {
    reader_ = std::make_unique<engine::CheckpointReader>(engine::checkpoint_folder(folder));
    if (holds_adapter(*reader_) && options.adapter.type == config::AdapterType::none)
      fail(
          ErrorKind::config, "checkpoint ", reader_->folder().string(),
          " is of a model with an adapter: give training.adapter, with this folder as its init_from, or make "
          "one model of both with `sherd export`");
    if (const auto from = configuration_of(*reader_).model;
        from &&
        (options.scores_texts() || from->gives_rewards() || options.pairs_texts() || from->pairs_texts()) &&
        scores_others(options, *from)) {
      const NameThere there = names_in(options, *from);
      const auto wanted = [there, pooler = takes_pooler(options, *from)](const std::string& name) {
        return is_of_base(name) && (there(name) == name || (pooler && name.starts_with("pooler.")));
      };
      source_ = without_scores(std::make_unique<engine::CheckpointWeights>(*reader_, device, wanted), there);
      if (options.adapter.type != config::AdapterType::none)
        add_adapter(adapter, options, device, std::move(prompt_ids));
      return;
    }
    const bool other = !adapter.init_from.empty() || !holds_adapter(*reader_);
    if (other && holds_adapter(*reader_) &&
        config::takes_from_base(configuration_of(*reader_).training.adapter.lora.init))
      fail(ErrorKind::config, "checkpoint ", reader_->folder().string(),
           " holds a model from whose weights a part was taken for its own adapter "
           "(training.adapter.init_lora_weights), and is no base for another one: merge the two with `sherd "
           "export`, or name the model that it began from");
    source_ = std::make_unique<engine::CheckpointWeights>(
        *reader_, device, other ? is_of_base : engine::CheckpointWeights::NameFilter());
    if (const config::Config saved = configuration_of(*reader_); saved.model && other) {
      models::GptConfig there = options;
      const auto of_data = static_cast<std::int64_t>(reader_->manifest().data.vocab_size);
      there.vocab_size = saved.model->vocab_size > 0 ? saved.model->vocab_size : of_data;
      there.pad_vocab_to_multiple_of = saved.model->pad_vocab_to_multiple_of;
      grow(there, options, device);
    }
    if (!other) {
      if (base_alone_) return;
      continues_adapter_ = options.adapter.type != config::AdapterType::none;
      engine::require_same_adapter(*reader_, options.adapter);
      source_ = one_prompt(*reader_, adapter, options, device, std::move(source_));
      return;
    }
  }
  if (options.adapter.type != config::AdapterType::none)
    add_adapter(adapter, options, device, std::move(prompt_ids));
}

/// Where the model has more ids than the weights, which `there` has.
void Weights::grow(const models::GptConfig& there, const models::GptConfig& options, device::Device& device) {
  if (there.vocab_size >= options.vocab_size || there.vocab_size == 0) return;
  smaller_ = std::move(source_);
  source_ = std::make_unique<models::GrownVocabulary>(*smaller_, there, options, device);
  notes_.push_back(cat(folder_, ": ", counted(options.vocab_size - there.vocab_size, "token"),
                       " of model.vocab_size ", options.vocab_size,
                       " are new: their vectors begin as the mean of the others'"));
}

/// The one prompt that the model has, taken from `source`, which is of `reader`; `source` itself where it
/// fits.
std::unique_ptr<nn::WeightSource> Weights::one_prompt(const engine::CheckpointReader& reader,
                                                      const config::Adapter& adapter,
                                                      const models::GptConfig& options,
                                                      device::Device& device,
                                                      std::unique_ptr<nn::WeightSource> source) {
  const config::Adapter saved = configuration_of(reader).training.adapter;
  const bool one =
      options.adapter.type == config::AdapterType::prompt_tuning && options.adapter.prompt.prompts() == 1;
  if (!one) engine::require_same_prompts(reader, adapter);
  if (!one || !saved.has_prompt()) return source;
  const std::string task = adapter.prompt.tasks.empty() ? "" : adapter.prompt.tasks[0].name;
  const bool several = saved.prompt.tasks.size() > 1;
  if (saved.type == options.adapter.type && !several) return source;
  const std::int64_t found = several ? saved.prompt.find(task) : 0;
  if (found < 0)
    fail(ErrorKind::config, "checkpoint ", reader.folder().string(), " has prompts for ",
         saved.prompt.task_names(),
         task.empty() ? ": say which in training.adapter.tasks" : cat(", and none for ", task));
  models::GptConfig of_source = options;
  of_source.adapter = models::resolved_adapter(saved, options);
  prompts_ = std::move(source);
  return std::make_unique<models::TaskPrompt>(*prompts_, of_source, found, device);
}

void Weights::add_adapter(const config::Adapter& adapter, const models::GptConfig& options,
                          device::Device& device, std::vector<std::int32_t> prompt_ids) {
  const std::string& folder = adapter.init_from;
  const std::vector<std::string> saved = models::saved_parameters(options);
  base_ = std::move(source_);
  nn::WeightSource* base = base_.get();
  if (config::takes_from_base(options.adapter.lora.init)) {
    products_ = std::make_unique<models::InitialProducts>(*base_, options, device);
    without_products_ = std::make_unique<models::WithoutProducts>(*products_);
    base = without_products_.get();
  }
  if (base_alone_) {
    source_ = std::make_unique<models::WithAdapter>(*base, nullptr);
    return;
  }
  if (is_peft(folder)) {
    if (options.adapter.type == config::AdapterType::p_tuning)
      fail(ErrorKind::config, "training.adapter.init_from: '", excerpt(folder, 300),
           "' holds the prompt that p-tuning's network made, not the network: go on from it with type "
           "\"prompt_tuning\", or from a checkpoint");
    const std::string text = (fs::path(folder) / peft_config).string();
    if (!saved.empty() && options.tied() && !models::keeps_weights_tied(read_file(text), text))
      fail(ErrorKind::config, "training.adapter.init_from: '", excerpt(folder, 300),
           "' has the table of tokens or the head apart, and the model has both as one: train it with PEFT's "
           "ensure_weight_tying, or set model.tie_embeddings to false");
    if (!models::is_adapter_hub(read_file(text), text))
      engine::require_same_adapter(models::from_peft(read_file(text), text), options.adapter, text);
    if (is_hugging_face(folder_))
      for (std::string& note : other_base(text, folder_, adapter)) notes_.push_back(std::move(note));
    adapter_ = std::make_unique<models::HuggingFaceWeights>(
        folder, models::HuggingFaceLayout(options).of_adapter(), models::adapter_stem(options.adapter.type));
  } else if (!folder.empty()) {
    adapter_reader_ = std::make_unique<engine::CheckpointReader>(engine::checkpoint_folder(folder));
    engine::require_same_adapter(*adapter_reader_, options.adapter);
    const auto trained = [saved](const std::string& name) {
      return models::is_adapter(name) || std::find(saved.begin(), saved.end(), name) != saved.end();
    };
    adapter_ = one_prompt(*adapter_reader_, adapter, options, device,
                          std::make_unique<engine::CheckpointWeights>(*adapter_reader_, device, trained));
  } else if (models::InitialAdapter::is_for(options.adapter)) {
    adapter_ = std::make_unique<models::InitialAdapter>(*base_, options, device, products_.get());
  } else if (!prompt_ids.empty()) {
    adapter_ = std::make_unique<models::VocabularyPrompt>(*base_, options, std::move(prompt_ids), device);
  }
  source_ = std::make_unique<models::WithAdapter>(*base, adapter_.get(), saved);
}

std::vector<std::string> Weights::begins_anew(const std::vector<nn::ParameterPtr>& parameters) const {
  std::vector<std::string> out;
  for (const nn::ParameterPtr& parameter : parameters) {
    if (!models::is_of_head(parameter->name) || source_->has(parameter->name)) continue;
    const std::string part = parameter->name.substr(0, parameter->name.find('.'));
    if (out.empty() || out.back() != part) out.push_back(part);
  }
  return out;
}

void Weights::verify_share(int rank, int ranks) const {
  if (reader_) reader_->verify_share(rank, ranks);
  if (adapter_reader_)
    adapter_reader_->verify_share(rank, ranks, engine::CheckpointReader::WhatToVerify::trained);
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

std::vector<std::int32_t> end_ids_of(const engine::CheckpointReader& reader,
                                     const data::Tokenizer& tokenizer) {
  std::vector<std::int32_t> out{tokenizer.end_of_document()};
  // Where there are no settings of generation, transformers makes them of the model's.
  std::string settings = companion(reader, "generation_config.json");
  if (settings.empty()) settings = companion(reader, "config.json");
  const auto object = nlohmann::json::parse(settings, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("eos_token_id")) return out;
  const nlohmann::json& ids = object["eos_token_id"];
  for (const nlohmann::json& id : ids.is_array() ? ids : nlohmann::json::array({ids}))
    if (id.is_number_integer() && id != out.front()) out.push_back(id.get<std::int32_t>());
  return out;
}

std::map<std::string, double> sampling_beside(const engine::CheckpointReader& reader) {
  const auto object = nlohmann::json::parse(companion(reader, "generation_config.json"), nullptr,
                                            /*allow_exceptions=*/false);
  std::map<std::string, double> out;
  if (!object.is_object()) return out;
  const bool draws = object.contains("do_sample") && object["do_sample"] == true;
  const auto is_of_draws = [](const std::string& key) {
    return key == "temperature" || key.ends_with("_p") || key == "top_k";
  };
  for (const auto& [key, neutral] :
       {std::pair{"repetition_penalty", 1.0}, std::pair{"temperature", 1.0}, std::pair{"top_k", 0.0},
        std::pair{"top_p", 1.0}, std::pair{"min_p", 0.0}, std::pair{"no_repeat_ngram_size", 0.0}})
    if (object.contains(key) && object[key].is_number() && object[key] != neutral &&
        (draws || !is_of_draws(key)))
      out.emplace(key, object[key].get<double>());
  return out;
}

data::FilesBeside companions_of(const engine::CheckpointReader& reader) {
  return [&reader](const std::string& name) { return companion(reader, name); };
}

data::ChatTemplate chat_template_of(const engine::CheckpointReader& reader,
                                    const data::Tokenizer& tokenizer) {
  const std::string& spec = reader.manifest().data.chat_template;
  if (!spec.empty()) return data::ChatTemplate::of_spec(spec, tokenizer);
  if (auto own = data::published_template(companions_of(reader), tokenizer, "the model")) return *own;
  return data::ChatTemplate::by_tokens(tokenizer);
}

DType published_dtype(const std::string& folder) {
  if (const std::optional<DType> said = parse_dtype(published_in(folder).dtype)) return *said;
  const tensor::SafetensorsFolder files(folder, "model");
  for (const std::string& name : files.names())
    if (const std::optional<DType>& type = files.find(name)->dtype; type && is_floating(*type))
      return *type == DType::f64 ? DType::f32 : *type;
  return DType::f32;
}

engine::ExtraFiles companion_files(const std::string& folder) {
  engine::ExtraFiles out;
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                           "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json",
                           "vocab.json", "merges.txt", "chat_template.jinja"}) {
    std::error_code error;
    const fs::path path = fs::path(folder) / name;
    if (fs::exists(path, error)) out[cat(companion_prefix, name)] = read_file(path);
  }
  const auto tokenizer = out.find(cat(companion_prefix, engine::tokenizer_json_file));
  if (tokenizer != out.end())
    tokenizer->second = data::with_tokens_beside(std::move(tokenizer->second), [&](const std::string& name) {
      const auto found = out.find(companion_prefix + name);
      return found != out.end() ? found->second : std::string();
    });
  return out;
}

}  // namespace sherd::cli
