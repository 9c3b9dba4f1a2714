#include <algorithm>
#include <limits>
#include <optional>

#include "base/excerpt.h"
#include "cli/command_line.h"
#include "cli/generate_request.h"
#include "cli/program.h"
#include "cli/prompts_file.h"
#include "cli/weights.h"
#include "comm/communicator.h"
#include "data/tokenizer.h"
#include "device/cuda.h"

namespace sherd::cli {
namespace {

/// The checkpoint's own copy, or else, in one that has none, what it names.
std::shared_ptr<const data::Tokenizer> tokenizer_of(const engine::CheckpointReader& reader) {
  const engine::Manifest& manifest = reader.manifest();
  if (manifest.data.tokenizer.empty() || manifest.data.vocab_size == 0)
    fail(ErrorKind::data, "checkpoint ", reader.folder().string(),
         " does not name its tokenizer: it was not trained on a dataset of `sherd prepare`, and a "
         "tokenizer.json "
         "is not read yet. `sherd export` makes files of it that transformers generates with");
  if (!manifest.files.contains(engine::tokenizer_file)) return data::make_tokenizer(manifest.data.tokenizer);
  return data::load_sentencepiece((reader.folder() / engine::tokenizer_file).string());
}

/// Where to generate, and how: one rank with all of the machine, whatever share of one each rank had in
/// training.
config::Device device_section(const config::Device& of_run, const std::string& type) {
  static const std::vector<std::string> types = {"auto", "cpu", "cuda"};
  config::Device section;
  section.type = of_run.type;
  section.tf32 = of_run.tf32, section.fused_gelu = of_run.fused_gelu;
  if (type.empty()) {
    if (section.type == config::DeviceType::cuda)
      if (const device::CudaStatus status = device::cuda_status(); !status.usable())
        fail(ErrorKind::config,
             "the run was made on GPUs, and there is no CUDA device here: ", status.why_not,
             "; give --device cpu");
    return section;
  }
  const auto found = std::find(types.begin(), types.end(), type);
  if (found == types.end()) throw UsageError(cat("--device is auto, cpu or cuda, not '", excerpt(type), "'"));
  section.type = static_cast<config::DeviceType>(found - types.begin());
  return section;
}

/// The run's configuration with the layout that is asked for here: one rank, unless `overrides` say else.
config::Config config_of(const engine::CheckpointReader& reader, const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"parallel.tensor=1",      "parallel.context=1",
                               "parallel.pipeline=1",    "parallel.virtual_stages=1",
                               "parallel.schedule=auto", "parallel.shard_size=null",
                               "parallel.expert=1"};
  for (const std::string& override : overrides) {
    if (!override.starts_with("parallel."))
      throw UsageError(cat("--set takes keys of the section parallel here, as parallel.tensor=2, not '",
                           excerpt(override), "'"));
    all.push_back(override);
  }
  config::Config config =
      config::parse_text(reader.manifest().config,
                         cat("the configuration in ", (reader.folder() / "manifest.json").string()), all);
  if (config.parallel.expert != 1)
    fail(ErrorKind::config, "parallel.expert is ", config.parallel.expert,
         ": every rank that generates has all experts; generate with tensor and pipeline ranks");
  if (config.parallel.context != 1)
    fail(
        ErrorKind::config, "parallel.context is ", config.parallel.context,
        ": a text grows by one token at a time, which has no parts; generate with tensor and pipeline ranks");
  return config;
}

/// The adapter of the checkpoint, or that of a folder.
void take_adapter(config::Config& config, const std::string& folder) {
  config::Adapter& adapter = config.training.adapter;
  adapter.init_from.clear();
  if (folder.empty()) return;
  adapter = config::parse_text(adapter_section(folder), cat("the adapter of ", excerpt(folder, 200)))
                .training.adapter;
  adapter.init_from = folder;
}

/// The options of the command.
CommandLine command_line() {
  CommandLine line(
      "generate", "Continues texts with a trained model.",
      "--checkpoint D (--prompt T | --prompts FILE [--output FILE] [--batch-size N]) [--tag TAG] "
      "[--adapter DIR] "
      "[--max-tokens N] [--temperature X] [--top-k K] [--top-p P] [--repetition-penalty X] [--stop TEXT]... "
      "[--seed S] [--device T] [--offload cpu|nvme] [--nvme-path DIR] [--set parallel.tensor=N] "
      "[--set parallel.pipeline=N] [--ranks N] [--device-memory SIZE]");
  line.value("checkpoint", "D", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("tag", "TAG", "of a run's checkpoints this one: global_stepN, best; not given: the latest")
      .value("adapter", "DIR",
             "with this adapter, of PEFT or of a run's checkpoints, in place of its own, if any")
      .value("prompt", "T", "the text to continue; empty: from the beginning of a document")
      .value("prompts", "FILE", "texts to continue: a line each, or of a .jsonl the \"prompt\" of each line")
      .value("output", "FILE", "lines of JSON with prompt, completion, tokens and finish; not given: stdout")
      .value("batch-size", "N", "texts that are under way at once", "8")
      .value("max-tokens", "N", "at most this many tokens", "100")
      .value("temperature", "X", "0 takes the likeliest token, 1 samples the model's distribution", "0.8")
      .value("top-k", "K", "sample among the K likeliest tokens; 0: all", "40")
      .value("top-p", "P", "and among the likeliest that together have probability P", "1")
      .value("repetition-penalty", "X", "divide the logits of tokens that the text has by this; 1: none", "1")
      .list("stop", "TEXT", "end before this text; may be repeated")
      .value("seed", "S", "of the sampling", "0")
      .value("device", "T", "auto, cpu or cuda; not given: what the run's device.type says")
      .value("offload", "cpu|nvme", "keep the weights there and bring them to the device block by block")
      .value("nvme-path", "DIR", "a folder on the drive for --offload nvme")
      .value("device-memory", "SIZE", "an error rather than more device memory than this, as 512MiB; 0: any",
             "0")
      .value("ranks", "N", "ranks in all; those beyond tensor x pipeline each keep a share of the weights")
      .list("set", "parallel.tensor=N",
            "this many ranks share the model, each on a GPU or a part of the cores of its own");
  return line;
}

std::vector<std::string> prompts_of(const CommandLine& line) {
  if (line.has("prompts") == line.has("prompt"))
    throw UsageError(line.has("prompt") ? "give --prompt or --prompts, not both"
                                        : "give --prompt T or --prompts FILE: what is to be continued");
  if (line.has("prompts")) return read_prompts(line.text("prompts"));
  for (const char* name : {"output", "batch-size"})
    if (line.has(name)) throw UsageError(cat("--", name, " goes with --prompts FILE"));
  return {line.text("prompt")};
}

models::Sampling sampling_of(const CommandLine& line, const data::Tokenizer& tokenizer) {
  models::Sampling sampling;
  sampling.temperature = line.number("temperature");
  sampling.top_k = static_cast<int>(line.integer("top-k", 0, std::numeric_limits<int>::max()));
  sampling.top_p = line.number("top-p");
  sampling.repetition_penalty = line.number("repetition-penalty");
  sampling.ids = tokenizer.vocab_size();  // published models have rows for more
  sampling.key = RandomKey{static_cast<std::uint64_t>(line.integer("seed", 0)), stable_hash("generate")};
  models::check_sampling(sampling);
  return sampling;
}

WeightsPlace place_of(const CommandLine& line) {
  WeightsPlace place;
  const std::string offload = line.text("offload");
  if (offload == "cpu")
    place.offload = config::OffloadDevice::cpu;
  else if (offload == "nvme")
    place.offload = config::OffloadDevice::nvme;
  else if (!offload.empty() && offload != "none")
    throw UsageError(cat("--offload is cpu or nvme, not '", excerpt(offload), "'"));
  place.nvme_path = line.text("nvme-path");
  if (!place.nvme_path.empty() && place.offload != config::OffloadDevice::nvme)
    throw UsageError("--nvme-path goes with --offload nvme");
  place.device_memory_limit = static_cast<std::uint64_t>(line.amount("device-memory", 0, 1024));
  return place;
}

}  // namespace

void generate_command(const Arguments& arguments) {
  CommandLine line = command_line();
  if (!line.parse(arguments)) return;
  const WeightsPlace place = place_of(line);
  const engine::CheckpointReader reader(
      engine::checkpoint_folder(line.required("checkpoint"), line.text("tag")));
  std::vector<std::string> prompts = prompts_of(line);
  for (const auto& [file, checksum] : reader.manifest().files) reader.verify(file);
  const auto tokenizer = tokenizer_of(reader);
  config::Config config = config_of(reader, line.all("set"));
  take_adapter(config, line.text("adapter"));
  config.device = device_section(config.device, line.text("device"));
  const int model_ranks = config.parallel.tensor * config.parallel.pipeline;
  const int ranks = line.has("ranks") ? static_cast<int>(line.integer("ranks", 1, 1 << 16)) : model_ranks;
  prepare_to_generate(config, place, ranks);
  Request request{reader,
                  *tokenizer,
                  config,
                  std::move(prompts),
                  line.all("stop"),
                  line.integer("max-tokens", 1),
                  line.integer("batch-size", 1),
                  sampling_of(line, *tokenizer)};
  std::optional<CompletionsFile> completions;
  if (line.has("prompts")) request.completions = &completions.emplace(line.text("output"), request.prompts);
  try {
    // Of these ranks alone: a launcher's variables may be left over, and nobody else would join.
    comm::run_local(ranks, {.timeout_seconds = config.parallel.timeout_seconds},
                    [&](comm::Communicator& world) {
                      const std::shared_ptr<comm::Communicator> borrowed(std::shared_ptr<void>(), &world);
                      generate(request, std::make_shared<Distributed>(borrowed, world.rank(), ranks));
                    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::memory) throw;
    fail(ErrorKind::memory, error.what(),
         ". Of generation: give --offload nvme --nvme-path DIR (or --offload cpu), a smaller --batch-size, "
         "fewer --max-tokens, or --ranks that share the weights");
  }
}

}  // namespace sherd::cli
