#include <algorithm>
#include <cstdio>

#include "base/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "comm/communicator.h"
#include "data/tokenizer.h"
#include "device/cuda.h"
#include "engine/checkpoint.h"
#include "engine/make_device.h"
#include "models/from_config.h"
#include "models/generate.h"

namespace sherd::cli {
namespace {

/// The checkpoint's own copy, or else, in one that has none, what it names.
std::shared_ptr<const data::Tokenizer> tokenizer_of(const engine::CheckpointReader& reader) {
  const engine::Manifest& manifest = reader.manifest();
  if (manifest.data.tokenizer.empty() || manifest.data.vocab_size == 0)
    fail(ErrorKind::data, "checkpoint ", reader.folder().string(),
         " does not name its tokenizer: it was not trained on a dataset of `sherd prepare`");
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

}  // namespace

void generate_command(const Arguments& arguments) {
  CommandLine line("generate", "Continues a text with a trained model.",
                   "--checkpoint D --prompt T [--max-tokens N] [--temperature X] [--top-k K] [--seed S] "
                   "[--device T]");
  line.value("checkpoint", "D", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("prompt", "T", "the text to continue; empty: from the beginning of a document")
      .value("max-tokens", "N", "at most this many tokens", "100")
      .value("temperature", "X", "0 takes the likeliest token, 1 samples the model's distribution", "0.8")
      .value("top-k", "K", "sample among the K likeliest tokens; 0: all", "40")
      .value("seed", "S", "of the sampling", "0")
      .value("device", "T", "auto, cpu or cuda; not given: what the run's device.type says");
  if (!line.parse(arguments)) return;
  const engine::CheckpointReader reader(engine::checkpoint_folder(line.required("checkpoint")));
  for (const auto& [file, checksum] : reader.manifest().files) reader.verify(file);
  const auto tokenizer = tokenizer_of(reader);
  config::Config config = config::parse_text(
      reader.manifest().config, cat("the configuration in ", (reader.folder() / "manifest.json").string()));
  config.device = device_section(config.device, line.text("device"));

  // Of itself alone: a launcher's variables may be left over, and nobody else would join.
  const auto dist = std::make_shared<Distributed>(comm::make_self({}), 0, 1);
  const auto device = engine::make_device(config, *dist);
  const auto kernels = engine::make_kernels(config, *device);
  auto model = std::make_shared<models::Gpt>(models::gpt_options(config, reader.manifest().data.vocab_size));
  sharding::ShardingOptions options;
  options.placements = sharding::make_placements(0, config.precision.compute, config.precision.compute,
                                                 config.precision.compute);
  sharding::ShardedModel sharded(model, options, {dist->world(), *kernels});
  engine::load_weights(reader, sharded, *kernels);

  std::vector<std::int32_t> prompt = tokenizer->encode(line.text("prompt"));
  if (prompt.empty()) prompt.push_back(tokenizer->end_of_document());
  models::Sampling sampling;
  sampling.temperature = line.number("temperature");
  sampling.top_k = static_cast<int>(line.integer("top-k", 0));
  sampling.key = RandomKey{static_cast<std::uint64_t>(line.integer("seed", 0)), stable_hash("generate")};
  sharding::Pass pass(sharded);
  Printer printer(*tokenizer, prompt);
  models::generate(*model, pass.tape(), prompt, line.integer("max-tokens", 1), sampling,
                   [&](std::int32_t id) {
                     if (id == tokenizer->end_of_document()) return false;
                     printer.add(id);
                     return std::ferror(stdout) == 0;
                   });
  std::fputc('\n', stdout);
}

}  // namespace sherd::cli
