#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/export/companions.h"
#include "cli/export/exported.h"
#include "cli/export/output_folder.h"
#include "cli/inference/inference.h"
#include "cli/program.h"
#include "cli/shown_weights.h"
#include "cli/weights.h"
#include "device/device.h"
#include "models/adapters/adapters.h"
#include "models/gguf/gguf_layout.h"
#include "models/gpt.h"
#include "models/gpt_config.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "tensor/formats/stored_format.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

DType dtype_of(const CommandLine& line, const std::string& otherwise) {
  const std::string name = line.has("dtype") ? line.text("dtype") : otherwise;
  const std::optional<DType> dtype = parse_dtype(name);
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::bf16 && *dtype != DType::f16))
    throw UsageError(cat("--dtype is bf16, fp16 or fp32, not '", excerpt(name), "'"));
  return *dtype;
}

/// --type, or what it is of a run that computed in `dtype`.
models::GgufType gguf_type_of(const CommandLine& line, const std::string& dtype, bool of_adapter) {
  if (line.has("dtype"))
    throw UsageError("--dtype is of safetensors: with --format gguf, --type says the type");
  using models::GgufType;
  if (!line.has("type"))
    return of_adapter ? GgufType::f32 : dtype == name_of(DType::f16) ? GgufType::f16 : GgufType::bf16;
  const std::string name = line.text("type");
  const auto type = models::parse_gguf_type(name);
  if (!type)
    throw UsageError(cat("--type is f32, f16, bf16, q8_0, q6_k, q4_0 or q4_k, not '", excerpt(name), "'"));
  if (of_adapter && models::values_of_block(*type) > 1)
    throw UsageError("--type of an adapter is f32, f16 or bf16: its matrices are small");
  return *type;
}

const char* torch_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
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
  nn::WeightSource& source = adapter ? static_cast<nn::WeightSource&>(merged) : weights;
  FewBitsExport few_bits(what.few_bits, model, layout, source);
  what.files.low_bits = few_bits.form();
  ShownWeights shown(source, model.parameters(), "exporting");
  const std::size_t shards = models::export_to_hugging_face(
      folder, layout, model.parameters(), few_bits.calibrates() ? source : shown, device, what.files);
  const char* dtype = torch_name(what.files.dtype);
  std::string text = models::to_hugging_face(*what.config.model, plain.vocab_size, dtype, original);
  text = few_bits.described(text, dtype);
  if (few_bits.form()) what.error = few_bits.form()->error();
  few_bits.warn();
  what.layers = few_bits.layers();
  if (plain.gives_rewards()) warn_of_padding(text);
  write_file_atomically(folder / "config.json", text);
  return shards;
}

/// Shares of what there was, that are gone.
nlohmann::ordered_json quantized_as_json(const Exported& what) {
  const auto known = [](double error) {
    return error < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(error);
  };
  nlohmann::ordered_json out{{"kind", models::name_of(what.few_bits.compressed->kind)},
                             {"calibrated_on", nullptr},
                             {"weights_error", what.error},
                             {"outputs_error", known(mean_output_error(what.layers))},
                             {"layers", nlohmann::ordered_json::array()}};
  if (!what.few_bits.calibrate.empty()) out["calibrated_on"] = what.few_bits.calibrate;
  for (const models::CompressedLayer& layer : what.layers)
    out["layers"].push_back({{"weight", layer.weight},
                             {"weights_error", layer.weight_error},
                             {"outputs_error", known(layer.output_error)}});
  return out;
}

/// " and int4, which rounded away …", or nothing.
std::string few_bits_in_words(const Exported& what) {
  if (!what.few_bits) return {};
  const double outputs = mean_output_error(what.layers);
  const auto percent = [](double share) { return std::round(share * 1e4) / 100; };
  return cat(" and ",
             what.few_bits.compressed ? models::name_of(what.few_bits.compressed->kind)
                                      : tensor::name_of(what.few_bits.format),
             ", which rounded away ", percent(what.error), " % of those weights (root mean square)",
             outputs < 0 ? "" : cat(" and changed layers' outputs by ", percent(outputs), " % on average"));
}

}  // namespace

CommandLine export_line() {
  CommandLine line(
      "export",
      "Writes a checkpoint's model as Hugging Face's transformers reads it: config.json, safetensors, "
      "tokenizer; or its adapter as PEFT, or AdapterHub, reads it; or either as a GGUF file, which llama.cpp "
      "reads. Any layout's, a part at a time.",
      "CKPT --output HF_DIR|FILE.gguf [--tag TAG] [--adapter [--task NAME] [--base DIR]] [--dtype "
      "bf16|fp16|fp32] "
      "[--format F] [--type T] [--quantize int8|fp8|int4 [--calibrate PREFIX]] "
      "[--max-shard-size 5GB] [--json]");
  line.list("from", "CKPT", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("output", "HF_DIR|FILE.gguf",
             "folder to make; it must not be there, or be empty; a file with --format gguf")
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
      .value(
          "format", "F",
          "linear layers' weights in few bits, rounded once: nf4, nf4_double, fp4, fp4_double or int8 as "
          "bitsandbytes has them, fp8 in squares, mxfp4 of GPT-OSS's experts; gguf: one file for llama.cpp")
      .value("type", "T",
             "with --format gguf, of matrices: f32, f16, bf16, q8_0, q6_k, q4_0, or q4_k as llama.cpp mixes "
             "Q4_K_M; not given: f16 of a run in fp16, else bf16, of an adapter alone f32")
      .value("max-shard-size", "N", "bytes of a file at most, as 5GB; a larger tensor has a file of its own",
             "5GB")
      .json()
      .rest_to("from");
  add_quantize_options(line);
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
  const std::string& computed = reader.manifest().compute_dtype;
  const bool gguf = line.text("format") == "gguf";
  if (gguf)
    what.gguf = gguf_type_of(line, computed, adapter);
  else if (line.has("type"))
    throw UsageError("--type is of a file of --format gguf");
  if (gguf && !line.required("output").ends_with(".gguf"))
    throw UsageError("with --format gguf, --output is a file whose name ends with .gguf");
  what.files.dtype = gguf ? DType::f32 : dtype_of(line, adapter ? "fp32" : computed);
  what.files.shard_bytes = static_cast<std::uint64_t>(line.amount("max-shard-size", 1, 1000));
  what.few_bits = few_bits_of(line, adapter, what.files.dtype);
  if (line.has("base") && !(adapter && config::takes_from_base(config.training.adapter.lora.init)))
    throw UsageError("--base is for --adapter of one that began as a part of the model's weights");
  if (!adapter) require_merges(reader, config.training.adapter);
  what.base = line.text("base");
  what.prompt = prompt_index(config.training.adapter, line.text("task"));
  models::published_as(*config.model);         // throws where transformers has no class for it
  if (gguf) models::GgufLayout{what.options};  // throws where llama.cpp has no graph of it
  OutputFolder output(line.required("output"), gguf);
  using engine::CheckpointReader;
  reader.verify_all(adapter ? CheckpointReader::WhatToVerify::trained : CheckpointReader::WhatToVerify::all);
  const auto device = device::make_cpu_device(1);
  std::size_t shards = 1;
  std::uint64_t bytes = 0;
  if (gguf)
    bytes = write_gguf(what, adapter, output.partial(), output.path().filename().string(), *device);
  else
    shards = adapter ? write_adapter(what, output.partial(), *device)
                     : write_model(what, output.partial(), *device);
  output.publish();
  const bool merged = !adapter && what.options.adapter.type != config::AdapterType::none;
  if (line.has("json")) {
    nlohmann::ordered_json told{
        {"folder", output.path().string()},
        {"checkpoint", reader.folder().string()},
        {"model", config::name_of(models::published_as(*config.model))},
        {"dtype", what.gguf ? models::name_of(*what.gguf) : name_of(what.files.dtype)},
        {"format", gguf ? "gguf" : tensor::name_of(what.few_bits.format)},
        {"adapter", adapter},
        {"adapter_merged", merged},
        {"files", shards}};
    if (what.few_bits.compressed) told["quantized"] = quantized_as_json(what);
    print_json(told);
  }
  log_info("exported ", adapter ? "the adapter of " : "", reader.folder().string(),
           merged ? ", its adapter merged," : "", " as ",
           config::name_of(models::published_as(*config.model)), " in ",
           what.gguf ? models::name_of(*what.gguf) : name_of(what.files.dtype), few_bits_in_words(what), ", ",
           gguf ? cat(bytes, " bytes") : counted(static_cast<std::int64_t>(shards), "file") + " of weights",
           ": ", output.path().string());
}

}  // namespace sherd::cli
