#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "cli/shown_weights.h"
#include "cli/weights.h"
#include "data/tokenizer.h"
#include "device/device.h"
#include "engine/report/report.h"
#include "models/gpt.h"
#include "models/gpt_config.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

/// The tokenizer among the files becomes the checkpoint's: tokenizer.json, or a SentencePiece model where
/// that is not there or not supported.
void take_tokenizer(const std::string& folder, engine::Manifest& manifest, engine::ExtraFiles& files) {
  std::string why_not;
  std::vector<std::pair<const char*, const char*>> kinds{{"hf:", engine::tokenizer_json_file}};
  for (const char* name : data::sentencepiece_files) kinds.emplace_back("spm:", name);
  for (const auto& [kind, name] : kinds) {
    const auto found = files.find(cat(companion_prefix, name));
    if (found == files.end()) continue;
    try {
      const auto tokenizer =
          data::make_tokenizer(cat(kind, (fs::path(folder) / name).string()), found->second);
      manifest.data.tokenizer = tokenizer->spec();
      manifest.data.vocab_size = tokenizer->vocab_size();
      files[kind == std::string("hf:") ? name : engine::tokenizer_file] = found->second;
      return;
    } catch (const Error& error) {
      why_not += cat(why_not.empty() ? "" : "; ", error.what());
    }
  }
  if (!why_not.empty()) log_warning("`sherd generate` will not know this checkpoint's tokenizer: ", why_not);
}

}  // namespace

CommandLine import_line() {
  CommandLine line(
      "import",
      "Makes a checkpoint of a model in Hugging Face's files: of its weights, in fp32, a part at a "
      "time. Training begins from either by training.init_from.",
      "HF_DIR --output D [--tag TAG] [--adapter PEFT_DIR] [--set model.K=V]... [--dtype bf16|fp16|fp32] "
      "[--json]");
  line.list("from", "HF_DIR",
            "folder with config.json and model.safetensors, or shards of it with their index")
      .value("output", "D", "folder of checkpoints to write to")
      .value("tag", "TAG", "name of the checkpoint in it", "imported")
      .value(
          "adapter", "PEFT_DIR",
          "an adapter of that model as PEFT, or AdapterHub, keeps it: the checkpoint holds both, as a run's "
          "that trains it")
      .list("set", "model.K=V", "override a key of the model that config.json describes, as model.seq_length")
      .value("dtype", "bf16|fp16|fp32",
             "what the model computes in where it is used as it is (generate, export); not given: the files' "
             "type")
      .json()
      .rest_to("from");
  return line;
}

void import_command(const CommandLine& line) {
  if (line.all("from").size() != 1) throw UsageError("name one folder to import. See 'sherd import --help'");
  const std::string folder = line.all("from").front();
  if (!is_hugging_face(folder))
    fail(ErrorKind::io, "'", excerpt(folder, 300), "' has no config.json: name a folder of Hugging Face's");
  std::vector<std::string> overrides = line.all("set");
  const std::optional<DType> dtype =
      line.has("dtype") ? parse_dtype(line.text("dtype")) : published_dtype(folder);
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::bf16 && *dtype != DType::f16))
    throw UsageError("--dtype is bf16, fp16 or fp32");
  if (*dtype != DType::f32) overrides.push_back(cat(name_of(*dtype), ".enabled=true"));
  const std::string peft = line.text("adapter");
  auto sections = nlohmann::json::parse(model_section(folder));
  if (!peft.empty()) {
    sections.update(nlohmann::json::parse(adapter_section(peft)));
    sections["training"]["adapter"]["init_from"] = peft, sections["training"]["init_from"] = folder;
  }
  const config::Config config = config::parse_text(sections.dump(), cat("the model of ", folder), overrides);
  const models::GptConfig options = models::gpt_config(config, config.model->vocab_size);
  const auto device = device::make_cpu_device(1);
  models::Gpt model(options);
  model.assign_names();
  Weights weights(folder, options, *device, config.training.adapter);
  weights.source().check(model.parameters());
  engine::Manifest manifest;
  manifest.config = config::dump(config);
  manifest.compute_dtype = name_of(*dtype);
  engine::ExtraFiles files = companion_files(folder);
  take_tokenizer(folder, manifest, files);
  for (const std::string& note : weights.notes()) log_info(note);
  for (const std::string& part : weights.begins_anew(model.parameters()))
    log_info(part, " is not among the weights, and begins anew");
  const std::string output = line.required("output"), tag = line.text("tag");
  {
    ShownWeights shown(weights.source(), model.parameters(), "importing");
    engine::write_weights(output, tag, std::move(manifest), model.parameters(), shown, files, *device);
  }
  if (line.has("json"))
    print_json(nlohmann::ordered_json{{"checkpoint", (fs::path(output) / tag).string()},
                                      {"model", config::name_of(config.model->type)},
                                      {"parameters", options.num_parameters()},
                                      {"dtype", name_of(*dtype)},
                                      {"adapter", !peft.empty()}});
  log_info(config::name_of(config.model->type), peft.empty() ? "" : " and an adapter", " with ",
           engine::human_count(static_cast<double>(options.num_parameters())), " parameters from ", folder,
           ": ", (fs::path(output) / tag).string());
}

}  // namespace sherd::cli
