#include <algorithm>
#include <cstdio>
#include <optional>

#include "base/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "comm/communicator.h"
#include "data/tokenizer.h"
#include "device/cuda.h"
#include "engine/checkpoint.h"
#include "engine/make_device.h"
#include "engine/model_stages.h"
#include "engine/process_grid.h"
#include "models/from_config.h"
#include "models/generate.h"

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

/// Prints text as tokens complete it: bytes of a character that is still incomplete wait for the next token.
class Printer {
 public:
  Printer(const data::Tokenizer& tokenizer, std::vector<std::int32_t> prompt)
      : tokenizer_(tokenizer), ids_(std::move(prompt)) {
    put();
  }
  void add(std::int32_t id) {
    ids_.push_back(id);
    put();
  }

 private:
  void put() {
    const std::string text = tokenizer_.decode(ids_);
    std::size_t end = text.size();
    // Back to the start of a UTF-8 sequence that is cut off at the end.
    std::size_t start = end;
    while (start > printed_ && end - start < 3 &&
           (static_cast<unsigned char>(text[start - 1]) & 0xc0) == 0x80)
      --start;
    if (start > printed_) {
      const auto lead = static_cast<unsigned char>(text[start - 1]);
      const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
      if (start - 1 + length > end) end = start - 1;
    }
    if (end > printed_) std::fwrite(text.data() + printed_, 1, end - printed_, stdout);
    printed_ = std::max(printed_, end);
    std::fflush(stdout);
  }

  const data::Tokenizer& tokenizer_;
  std::vector<std::int32_t> ids_;
  std::size_t printed_ = 0;
};

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

/// What generates: its checkpoint and tokenizer, and how.
struct Request {
  const engine::CheckpointReader& reader;
  const data::Tokenizer& tokenizer;
  const config::Config& config;
  std::vector<std::int32_t> prompt;
  std::int64_t max_tokens;
  models::Sampling sampling;
};

/// One rank's part: all draw the same tokens, and rank 0 prints them.
void generate(const Request& request, const DistributedPtr& dist) {
  const config::Config& config = request.config;
  const auto device = engine::make_device(config, *dist);
  const auto kernels = engine::make_kernels(config, *device);
  const auto groups = make_groups(dist, config);
  groups->bind(device);
  const auto model = std::make_shared<models::Gpt>(
      models::gpt_options(config, request.reader.manifest().data.vocab_size), layout_of(*groups, config));
  engine::require_cut(*model, *groups, *dist, true);
  const engine::StageLayout stages = engine::agree_on_stages(*model, config, *groups, *dist, true);
  const engine::StateGroups state_groups(*model, stages, *groups);
  sharding::ShardingOptions options;
  options.placements = sharding::make_placements(0, config.precision.compute, config.precision.compute,
                                                 config.precision.compute);
  sharding::StateSources sources{{groups->group(comm::Axis::shard)}, *kernels};
  sources.model_ranks = &groups->world();
  sources.groups_of = [&](const autograd::Parameter& parameter) { return state_groups.of(parameter); };
  options.parts = stages.all_own();
  sharding::ShardedModel sharded(model, options, sources);
  engine::load_weights(request.reader, sharded, *kernels);
  sharding::Pass pass(sharded);
  std::optional<engine::ModelStages> over_stages;
  if (stages.stages > 1) over_stages.emplace(*model, stages, groups->group(comm::Axis::pipeline));
  std::optional<Printer> printer;
  if (dist->rank() == 0) printer.emplace(request.tokenizer, request.prompt);
  const bool alone = dist->world_size() == 1;
  models::generate(*model, pass.tape(), request.prompt, request.max_tokens, request.sampling,
                   [&](std::int32_t id) {
                     if (id == request.tokenizer.end_of_document()) return false;
                     if (printer) printer->add(id);
                     return !alone || std::ferror(stdout) == 0;  // of which other ranks know nothing
                   });
}

}  // namespace

void generate_command(const Arguments& arguments) {
  CommandLine line(
      "generate", "Continues a text with a trained model.",
      "--checkpoint D --prompt T [--tag TAG] [--max-tokens N] [--temperature X] [--top-k K] [--seed S] "
      "[--device T] [--set parallel.tensor=N] [--set parallel.pipeline=N]");
  line.value("checkpoint", "D", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("tag", "TAG", "of a run's checkpoints this one: global_stepN, best; not given: the latest")
      .value("prompt", "T", "the text to continue; empty: from the beginning of a document")
      .value("max-tokens", "N", "at most this many tokens", "100")
      .value("temperature", "X", "0 takes the likeliest token, 1 samples the model's distribution", "0.8")
      .value("top-k", "K", "sample among the K likeliest tokens; 0: all", "40")
      .value("seed", "S", "of the sampling", "0")
      .value("device", "T", "auto, cpu or cuda; not given: what the run's device.type says")
      .list("set", "parallel.tensor=N",
            "this many ranks share the model, each on a GPU or a part of the cores of its own");
  if (!line.parse(arguments)) return;
  const engine::CheckpointReader reader(
      engine::checkpoint_folder(line.required("checkpoint"), line.text("tag")));
  for (const auto& [file, checksum] : reader.manifest().files) reader.verify(file);
  const auto tokenizer = tokenizer_of(reader);
  config::Config config = config_of(reader, line.all("set"));
  config.device = device_section(config.device, line.text("device"));
  std::vector<std::int32_t> prompt = tokenizer->encode(line.text("prompt"));
  if (prompt.empty()) prompt.push_back(tokenizer->end_of_document());
  models::Sampling sampling;
  sampling.temperature = line.number("temperature");
  sampling.top_k = static_cast<int>(line.integer("top-k", 0));
  sampling.ids = tokenizer->vocab_size();  // published models have rows for more
  sampling.key = RandomKey{static_cast<std::uint64_t>(line.integer("seed", 0)), stable_hash("generate")};
  const Request request{reader, *tokenizer, config, prompt, line.integer("max-tokens", 1), sampling};
  // Of these ranks alone: a launcher's variables may be left over, and nobody else would join.
  const int ranks = config.parallel.tensor * config.parallel.pipeline;
  comm::run_local(ranks, {.timeout_seconds = config.parallel.timeout_seconds},
                  [&](comm::Communicator& world) {
                    const std::shared_ptr<comm::Communicator> borrowed(std::shared_ptr<void>(), &world);
                    generate(request, std::make_shared<Distributed>(borrowed, world.rank(), ranks));
                  });
  std::fputc('\n', stdout);
}

}  // namespace sherd::cli
