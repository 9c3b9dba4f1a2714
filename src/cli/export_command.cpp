#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/files.h"
#include "base/log.h"
#include "base/run_lock.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/inference/exported_tokenizer.h"
#include "cli/inference/inference.h"
#include "cli/program.h"
#include "cli/shown_weights.h"
#include "cli/weights.h"
#include "data/tokenizer.h"
#include "device/device.h"
#include "engine/checkpoint/format.h"
#include "models/adapters/adapters.h"
#include "models/adapters/initial_adapter.h"
#include "models/adapters/prompt_weights.h"
#include "models/gpt.h"
#include "models/gpt_config.h"
#include "models/hub/adapter_names.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/adapter_targets.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "models/hub/low_bit_export.h"
#include "tensor/formats/stored_format.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

/// The ids of the model that a config.json describes; 0: it does not say.
std::int64_t ids_in(const std::string& config) {
  const auto object = nlohmann::json::parse(config, nullptr, /*allow_exceptions=*/false);
  const bool says = object.is_object() && object.contains("vocab_size") && object["vocab_size"].is_number();
  return says ? object["vocab_size"].get<std::int64_t>() : 0;
}

/// Copies the tokenizer and settings that the model came with, or else the tokenizer that it was trained
/// with; a model that has come to have more ids, `ids`, has the latter. Returns the text of the config.json
/// among them; empty: none.
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

/// A folder that appears when it is complete: until then it is PATH.partial, which one process at a time
/// writes to. What a dead one left there goes.
class OutputFolder {
 public:
  /// Throws Error{io} where something stands in the way.
  explicit OutputFolder(const fs::path& path) : path_(without_slash(path)), partial_(path_) {
    std::error_code error;
    partial_ += ".partial";
    if (fs::exists(path_, error) && !(fs::is_directory(path_, error) && fs::is_empty(path_, error)))
      fail(ErrorKind::io, "'", path_.string(), "' is there already: name a new folder");
    if (fs::exists(partial_, error) && !fs::exists(partial_ / lock_name, error))
      fail(ErrorKind::io, "'", partial_.string(),
           "' is there, and no export made it: move it, or name another --output");
    fs::create_directories(partial_, error);
    if (error) fail(ErrorKind::io, "cannot make '", partial_.string(), "': ", error.message());
    lock_.emplace(partial_ / lock_name, LockUse{path_, "export", "another --output"});
    for (const auto& entry : fs::directory_iterator(partial_))
      if (entry.path().filename() != lock_name) fs::remove_all(entry.path(), error);
  }
  ~OutputFolder() {
    if (!lock_) return;
    std::error_code error;
    fs::remove_all(partial_, error);
  }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const fs::path& path() const { return path_; }
  const fs::path& partial() const { return partial_; }
  void publish() {
    lock_->remove();
    std::error_code error;
    fs::remove(path_, error);
    fs::rename(partial_, path_, error);
    if (error)
      fail(ErrorKind::io, "cannot rename '", partial_.string(), "' to '", path_.string(),
           "': ", error.message());
    lock_.reset();
  }

 private:
  static constexpr const char* lock_name = ".sherd-export";
  static fs::path without_slash(const fs::path& path) {
    const fs::path plain = path.lexically_normal();
    return plain.has_filename() ? plain : plain.parent_path();
  }
  fs::path path_, partial_;
  std::optional<RunLock> lock_;  ///< while there is something to clean up
};

DType dtype_of(const CommandLine& line, const std::string& otherwise) {
  const std::string name = line.has("dtype") ? line.text("dtype") : otherwise;
  const std::optional<DType> dtype = parse_dtype(name);
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::bf16 && *dtype != DType::f16))
    throw UsageError(cat("--dtype is bf16, fp16 or fp32, not '", excerpt(name), "'"));
  return *dtype;
}

/// The format of that name, in which files may be.
StoredFormat format_of(const std::string& name, bool of_adapter) {
  const std::optional<StoredFormat> format = tensor::parse_stored_format(name);
  if (!format || *format == StoredFormat::compute || *format == StoredFormat::bf16)
    throw UsageError(
        cat("--format is nf4, nf4_double, fp4, fp4_double, int8, fp8 or mxfp4, not '", excerpt(name), "'"));
  if (of_adapter) throw UsageError("--format is of a model's weights; an adapter's are written whole");
  return *format;
}

const char* torch_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
}

/// The model that is exported, and how.
struct Exported {
  const engine::CheckpointReader& reader;
  const config::Config& config;
  models::GptConfig options;
  models::ExportOptions files;
  std::int64_t prompt = 0;                      ///< which one of several
  StoredFormat format = StoredFormat::compute;  ///< of linear layers' weights; compute: as the others
  double error = 0;                             ///< what that rounded away, over what there was
  std::string base = {};                        ///< --base
};

/// The share that keeping weights in a format may round away, with room.
double most_rounding(StoredFormat format) {
  switch (format) {
    case StoredFormat::compute:
    case StoredFormat::bf16:
      return 0.005;
    case StoredFormat::int8:
      return 0.02;
    case StoredFormat::fp8:
      return 0.05;
    default:
      return 0.2;  // of 4 bits
  }
}

/// The model from whose weights an adapter took a part: --base, or what its run began from, or, where that
/// was a checkpoint of such a run itself, what that one did.
std::string began_from(const Exported& what) {
  if (!what.base.empty()) return what.base;
  if (what.reader.manifest().base) return what.reader.manifest().base->folder;
  std::string folder = what.config.training.init_from;
  for (int runs = 0; runs < 100 && holds_checkpoints(folder); ++runs) {
    const config::Config before =
        configuration_of(engine::CheckpointReader(engine::checkpoint_folder(folder)));
    if (!config::takes_from_base(before.training.adapter.lora.init)) break;
    folder = before.training.init_from;
  }
  return folder;
}

/// What an adapter began as that took parts of the model's weights: found in these again.
class Begun {
 public:
  /// Throws Error{config} for weights that the checkpoint's do not come from.
  Begun(const Exported& what, nn::WeightSource& weights, device::Device& device)
      : folder_(require_there(began_from(what))),
        base_(folder_, plain(what.options), device),
        products_(base_.source(), what.options, device) {
    if (what.reader.manifest().base)
      compare_files(*what.reader.manifest().base);
    else
      compare(what, weights, device);
  }
  models::InitialProducts& products() { return products_; }

 private:
  static models::GptConfig plain(models::GptConfig options) {
    options.adapter = {};
    return options;
  }
  static std::string require_there(std::string folder) {
    std::error_code error;
    if (!fs::is_directory(folder, error))
      fail(ErrorKind::config, "the adapter began as a part of the weights in '", excerpt(folder, 300),
           "', without which it is written for nobody: there is no such folder now; name that model with "
           "--base");
    return folder;
  }
  [[noreturn]] void another(const std::string& what) const {
    fail(ErrorKind::config, "the weights in '", excerpt(folder_, 300),
         "' are not those from which the adapter took its part: ", what,
         " is another; name the model with --base");
  }
  /// The checkpoint does not hold them, and knows their files.
  void compare_files(const engine::BaseReference& base) const {
    for (const auto& [name, sum] : base.files) {
      std::error_code error;
      const fs::path path = fs::path(folder_) / name;
      const bool there = fs::exists(path, error);
      if (there ? engine::checksum_file(path) != sum : name.ends_with(".safetensors")) another(name);
    }
  }
  void compare(const Exported& what, nn::WeightSource& weights, device::Device& device) {
    models::WithoutProducts expected(products_);
    models::Gpt model(what.options);
    model.assign_names();
    for (const nn::ParameterPtr& parameter : model.parameters()) {
      const std::string layer = parameter->name.substr(0, parameter->name.rfind('.'));
      if (!parameter->name.ends_with(".weight") || !products_.of(layer)) continue;
      const std::int64_t count = std::min<std::int64_t>(parameter->numel(), 1 << 16);
      const auto read = [&](nn::WeightSource& from) {
        tensor::Tensor out = tensor::Tensor::empty(device, {count}, DType::f32);
        from.read(parameter->name, tensor::Slice::whole(parameter->shape), 0, out);
        return out;
      };
      const tensor::Tensor there = read(expected), here = read(weights);
      const StoredFormat format = what.options.adapter.stored_base();
      const bool kept = format == StoredFormat::compute ||
                        tensor::round_to_format(
                            format, {there.data<float>(), static_cast<std::size_t>(count)}, device.arena());
      double apart = 0, squares = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const double value = there.data<float>()[i];
        apart += std::pow(value - here.data<float>()[i], 2), squares += value * value;
      }
      // Tensor ranks may have cut blocks otherwise.
      const auto ranks = what.reader.manifest().grid.find("tensor");
      const bool same_blocks = ranks == what.reader.manifest().grid.end() || ranks->second == 1;
      const double most = same_blocks ? 0.005 : most_rounding(format);
      if (!kept || !(apart <= most * most * squares)) another(parameter->name);
    }
  }

  std::string folder_;
  Weights base_;
  models::InitialProducts products_;
};

/// Writes the adapter alone, as it is published. Returns the number of files of weights.
std::size_t write_adapter(const Exported& what, const fs::path& folder, device::Device& device) {
  const config::Adapter& adapter = what.config.training.adapter;
  if (adapter.type == config::AdapterType::none)
    fail(ErrorKind::config, "--adapter: checkpoint ", what.reader.folder().string(),
         " is of a run without training.adapter; without --adapter its model is exported");
  models::Gpt model(what.options);
  model.assign_names();
  engine::CheckpointWeights weights(what.reader, device);
  weights.check(model.parameters());
  models::ExportOptions files = what.files;
  files.stem = models::adapter_stem(adapter.type);
  const auto describe = [&](const config::Adapter& keys, const models::GptConfig& options) {
    write_file_atomically(folder / "adapter_config.json",
                          models::adapter_config(keys, options, what.config.training.init_from));
  };
  const auto write = [&](const models::Gpt& of, nn::WeightSource& from) {
    return models::export_to_hugging_face(
        folder, models::HuggingFaceLayout(of.config()).of_adapter(),
        models::adapter_parameters(of.parameters(), models::saved_parameters(of.config())), from, device,
        files);
  };
  if (config::takes_from_base(adapter.lora.init)) {
    Begun begun(what, weights, device);
    models::PlainLora plain(weights, begun.products(), device);
    models::GptConfig options = what.options;
    options.adapter = models::PlainLora::keys(options.adapter);
    models::Gpt doubled(options);
    doubled.assign_names();
    describe(models::PlainLora::keys(adapter), options);
    log_info(
        "LoRA of twice the rank, beside the weights as the model has them, computes the same",
        adapter.stored_base() == StoredFormat::compute
            ? ""
            : " but for what base_format rounds away, which only the merged model keeps: load these in 16 "
              "bits");
    return write(doubled, plain);
  }
  describe(adapter, what.options);
  const auto parameters = model.parameters();
  if (adapter.lora.target_parameters.empty() &&
      std::any_of(parameters.begin(), parameters.end(), [](const nn::ParameterPtr& p) {
        return models::is_adapter(p->name) && models::is_of_expert(p->name);
      }))
    log_warning(
        "these are adapters of experts' modules, which today's PEFT reads of some models alone "
        "(docs/adapters.md, "
        "\"Experts\"): for PEFT train with training.adapter.target_parameters, or export the merged model");
  if (!adapter.has_prompt()) return write(model, weights);
  models::Gpt one(models::TaskPrompt::config(what.options));
  one.assign_names();
  models::TaskPrompt prompt(weights, what.options, what.prompt, device);
  return write(one, prompt);
}

/// Throws for an adapter that is no part of weights.
void require_merges(const engine::CheckpointReader& reader, const config::Adapter& adapter) {
  if (adapter.type == config::AdapterType::bottleneck)
    fail(
        ErrorKind::config, "checkpoint ", reader.folder().string(),
        " is of a model with bottleneck adapters, whose non-linearity is no part of the weights: export them "
        "with --adapter, beside the model that they were trained on");
  if (adapter.has_prompt())
    fail(ErrorKind::config, "checkpoint ", reader.folder().string(), " is of a model with a prompt (",
         config::name_of(adapter.type),
         "), which stands in front of texts and is no part of the weights: export it with --adapter, beside "
         "the "
         "model that it was trained on");
}

/// How a model's matrices are written in few bits; null: in none.
std::unique_ptr<models::LowBitExport> low_bits_of(models::Gpt& model, StoredFormat format) {
  if (format == StoredFormat::compute) return nullptr;
  std::set<std::string> linear;
  for (const nn::ParameterPtr& weight : model.linear_weights()) linear.insert(weight->name);
  return std::make_unique<models::LowBitExport>(format, model.config(), std::move(linear));
}

/// The published matrices that stay as they are.
std::vector<std::string> left_whole(const models::Gpt& model, const models::HuggingFaceLayout& layout,
                                    const models::LowBitExport& low_bits) {
  std::vector<std::string> out;
  for (const nn::ParameterPtr& parameter : model.parameters())
    for (const models::PublishedTensor& tensor : layout.published(parameter->name).tensors)
      if (tensor.shape.rank() == 2 && tensor.stacked == 0 && !low_bits.takes(parameter->name, tensor))
        out.push_back(tensor.name);
  if (model.config().tied()) out.push_back(layout.head());
  return out;
}

/// transformers gives a text's reward at its last token that is not the padding's.
void warn_of_padding(const std::string& text) {
  const auto config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto id = [&](const char* key) {
    return config.is_object() ? config.value(key, nlohmann::json()) : nlohmann::json();
  };
  const nlohmann::json pad = id("pad_token_id");
  if (pad.is_null() || pad == id("eos_token_id"))
    log_warning("config.json's pad_token_id is ", pad.is_null() ? "not given" : "the id that ends texts",
                ": transformers finds the last token of a text by it, and ",
                pad.is_null() ? "refuses several at once" : "would give other rewards",
                "; set it to an id that no text ends with");
}

/// Writes the model, into which an adapter is merged.
std::size_t write_model(Exported& what, const fs::path& folder, device::Device& device) {
  models::GptConfig plain = what.options;
  plain.adapter = {};
  models::Gpt model(plain), adapted(what.options);
  model.assign_names(), adapted.assign_names();
  engine::CheckpointWeights weights(what.reader, device);
  weights.check(adapted.parameters());
  const std::string original = copy_companions(what.reader, plain.vocab_size, folder);
  models::MergedWeights merged(weights, what.options, device);
  const models::HuggingFaceLayout layout(plain);
  const bool adapter = what.options.adapter.type != config::AdapterType::none;
  const auto low_bits = low_bits_of(model, what.format);
  what.files.low_bits = low_bits.get();
  ShownWeights shown(adapter ? static_cast<nn::WeightSource&>(merged) : weights, model.parameters(),
                     "exporting");
  const std::size_t shards =
      models::export_to_hugging_face(folder, layout, model.parameters(), shown, device, what.files);
  const char* dtype = torch_name(what.files.dtype);
  std::string text = models::to_hugging_face(*what.config.model, plain.vocab_size, dtype, original);
  if (low_bits) {
    text = low_bits->described(text, left_whole(model, layout, *low_bits), dtype);
    what.error = low_bits->error();
  }
  if (plain.gives_rewards()) warn_of_padding(text);
  write_file_atomically(folder / "config.json", text);
  return shards;
}

}  // namespace

CommandLine export_line() {
  CommandLine line(
      "export",
      "Writes a checkpoint's model as Hugging Face's transformers reads it: config.json, safetensors, "
      "tokenizer; or its adapter as PEFT, or AdapterHub, reads it. Any layout's, a part at a time.",
      "CKPT --output HF_DIR [--tag TAG] [--adapter [--task NAME] [--base DIR]] [--dtype bf16|fp16|fp32] "
      "[--format F] "
      "[--max-shard-size 5GB] [--json]");
  line.list("from", "CKPT", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("output", "HF_DIR", "folder to make; it must not be there, or be empty")
      .value("tag", "TAG", "this checkpoint of the folder instead of its latest")
      .flag("adapter",
            "the run's adapter alone, as PEFT or AdapterHub keeps it; else it is merged into the model")
      .value("task", "NAME", "with --adapter: this task's prompt, where training.adapter.tasks names several")
      .value(
          "base", "DIR",
          "with --adapter, of one that began as a part of the weights: the model that it began from, where "
          "training.init_from is not there any more")
      .value(
          "dtype", "bf16|fp16|fp32",
          "of the weights, rounded from fp32; not given: what the run computed in, of an adapter alone fp32")
      .value("format", "F",
             "linear layers' weights in few bits, rounded once: nf4, nf4_double, fp4, fp4_double or int8 as "
             "bitsandbytes has them, fp8 in squares, mxfp4 of GPT-OSS's experts")
      .value("max-shard-size", "N", "bytes of a file at most, as 5GB; a larger tensor has a file of its own",
             "5GB")
      .json()
      .rest_to("from");
  return line;
}

void export_command(const CommandLine& line) {
  if (line.all("from").size() != 1)
    throw UsageError("name one checkpoint to export. See 'sherd export --help'");
  const engine::CheckpointReader reader(
      engine::checkpoint_folder(line.all("from").front(), line.text("tag")));
  const config::Config config = configuration_of(reader);
  if (!config.model)
    fail(ErrorKind::config, "checkpoint ", reader.folder().string(),
         " is of a model of its program's own, which transformers has no class for");
  const bool adapter = line.has("adapter");
  Exported what{reader, config, models::gpt_config(config, reader.manifest().data.vocab_size), {}, 0};
  what.files.dtype = dtype_of(line, adapter ? "fp32" : reader.manifest().compute_dtype);
  what.files.shard_bytes = static_cast<std::uint64_t>(line.amount("max-shard-size", 1, 1000));
  if (line.has("format")) what.format = format_of(line.text("format"), adapter);
  if (line.has("base") && !(adapter && config::takes_from_base(config.training.adapter.lora.init)))
    throw UsageError("--base is for --adapter of one that began as a part of the model's weights");
  if (!adapter) require_merges(reader, config.training.adapter);
  what.base = line.text("base");
  what.prompt = prompt_index(config.training.adapter, line.text("task"));
  models::published_as(*config.model);  // throws where transformers has no class for it
  OutputFolder output(line.required("output"));
  using engine::CheckpointReader;
  reader.verify_all(adapter ? CheckpointReader::WhatToVerify::trained : CheckpointReader::WhatToVerify::all);
  const auto device = device::make_cpu_device(1);
  const std::size_t shards =
      adapter ? write_adapter(what, output.partial(), *device) : write_model(what, output.partial(), *device);
  output.publish();
  const bool merged = !adapter && what.options.adapter.type != config::AdapterType::none;
  if (line.has("json"))
    print_json(nlohmann::ordered_json{{"folder", output.path().string()},
                                      {"checkpoint", reader.folder().string()},
                                      {"model", config::name_of(models::published_as(*config.model))},
                                      {"dtype", name_of(what.files.dtype)},
                                      {"format", tensor::name_of(what.format)},
                                      {"adapter", adapter},
                                      {"adapter_merged", merged},
                                      {"files", shards}});
  log_info("exported ", adapter ? "the adapter of " : "", reader.folder().string(),
           merged ? ", its adapter merged," : "", " as ",
           config::name_of(models::published_as(*config.model)), " in ", name_of(what.files.dtype),
           what.format == StoredFormat::compute
               ? ""
               : cat(" and ", tensor::name_of(what.format), ", which rounded away ",
                     std::round(what.error * 1e4) / 100, " % of those weights (root mean square)"),
           ", ", counted(static_cast<std::int64_t>(shards), "file"), " of weights: ", output.path().string());
}

}  // namespace sherd::cli
