#include "planning/generation.h"

#include <algorithm>

#include "autograd/key_cache.h"
#include "base/error.h"
#include "engine/estimate/dry_run.h"
#include "engine/estimate/price.h"
#include "engine/estimate/step_time.h"
#include "models/gpt.h"
#include "models/inference/generate.h"

namespace sherd::planning {
namespace {

using autograd::KeyCache;
using engine::Work;

/// The run of a model that generates: whole on its tensor ranks, nothing sharded.
config::Config inferring(config::Config config, int tensor) {
  config.zero = {};
  config.parallel = {};
  config.parallel.tensor = tensor, config.parallel.sequence_parallel = false;
  config.training.recompute = Recompute::none;
  config.batch = {};
  config.batch.micro_batch_size = config.batch.gradient_accumulation_steps = config.batch.train_batch_size =
      1;
  return config;
}

/// A model that is there to be asked what passes over texts would do.
class DryGeneration {
 public:
  DryGeneration(const config::Config& config, std::int64_t vocabulary)
      : run_(config, model_of(config, vocabulary),
             [](device::Device& device) {
               const auto ids = [&] { return tensor::Tensor::empty(device, {1, 1}, DType::i32); };
               return tensor::Batch{{"tokens", ids()}, {"labels", ids()}};
             },
             {.ranks = config.parallel.tensor, .local_ranks = config.parallel.tensor},
             {.kernels = [this](const tensor::KernelWork& work) { tell(work); },
              .calls = [this](const comm::CommWork& work) { tell(work); }}) {}

  /// A pass over `rows` rows of each text, behind `stored` rows; `bytes`: what the cache then holds.
  /// `source`: what an encoder reads where texts begin.
  std::vector<Work> pass(std::int64_t texts, std::int64_t stored, std::int64_t rows, std::uint64_t& bytes,
                         std::int64_t source) {
    KeyCache cache(texts, stored + rows);
    pass_.clear();
    run_.engine().evaluate([&](autograd::Tape& tape) {
      const autograd::WithKeyCache continues(tape, cache);
      if (stored > 0) read(tape, cache, texts, 0, source > 0 ? 1 : stored, source);
      telling_ = true;
      read(tape, cache, texts, stored, rows, stored == 0 ? source : 0);
      telling_ = false;
    });
    bytes = cache.bytes();
    return std::move(pass_);
  }

  std::uint64_t weight_bytes(DType dtype) {
    std::uint64_t out = 0;
    for (const auto& parameter : run_.engine().module().parameters())
      out += static_cast<std::uint64_t>(parameter->numel()) * size_of(dtype);
    return out;
  }

 private:
  static ModelSource model_of(const config::Config& config, std::int64_t vocabulary) {
    return [shape = models::gpt_config(config, vocabulary)](const parallel::Layout& layout) {
      return std::make_shared<models::Gpt>(shape, layout);
    };
  }
  void read(autograd::Tape& tape, KeyCache& cache, std::int64_t texts, std::int64_t first, std::int64_t rows,
            std::int64_t source) {
    std::vector<KeyCache::Rows> places;
    for (std::int64_t text = 0; text < texts; ++text) places.push_back({text, first, rows});
    cache.begin(tape.device(), std::move(places), rows, source);
    dynamic_cast<models::Gpt&>(run_.engine().module())
        .next_logits(tape, tensor::Tensor::empty(tape.device(), {texts, source + rows}, DType::i32));
  }
  void tell(Work work) {
    if (telling_) pass_.push_back(std::move(work));
  }

  bool telling_ = false;
  std::vector<Work> pass_;
  engine::DryRun run_;
};

}  // namespace

GenerationTime generation_time(const config::Config& config, const config::Machine& machine,
                               std::int64_t vocabulary, int tensor, const GenerationShape& shape) {
  const config::Config run = inferring(config, tensor);
  engine::require_rates(run, machine, tensor);
  const models::GptConfig model = models::gpt_config(run, vocabulary);
  if (!model.causal) fail(ErrorKind::config, "an encoder (model.causal is false) does not continue texts");
  // An encoder reads the prompt, and a decoder begins with a token of its own.
  const std::int64_t source = model.has_encoder() ? shape.prompt : 0, prompt = source > 0 ? 1 : shape.prompt;
  if (model.has_encoder() && (source > model.encoder.seq_length || shape.tokens > model.target_length()))
    fail(ErrorKind::config, "a prompt of ", source, " tokens with an answer of ", shape.tokens,
         " is longer than the model's ", model.encoder.seq_length, " and ", model.target_length(),
         " positions (model.encoder.seq_length, and what it leaves of model.seq_length): shorten either");
  if (prompt + shape.tokens - 1 > model.max_text())
    fail(ErrorKind::config, "a prompt of ", shape.prompt, " tokens with ", shape.tokens,
         " that follow is longer than the model's ", model.max_text(),
         " positions (model.seq_length): shorten either");
  DryGeneration dry(run, vocabulary);
  const config::DeviceRates& rates = machine.rates_of(tensor);
  const auto seconds = [&](const std::vector<Work>& pass) {
    return engine::price(pass, machine, rates).seconds;
  };
  GenerationTime out{.tensor = tensor, .batch = shape.batch};
  std::uint64_t keys = 0;
  // Prompts are read as many at a time as generation does.
  const std::int64_t together =
      std::clamp<std::int64_t>(models::most_prompt_rows / shape.prompt, 1, shape.batch);
  out.prefill =
      seconds(dry.pass(together, 0, prompt, keys, source)) * static_cast<double>(shape.batch / together);
  if (const std::int64_t left = shape.batch % together; left > 0)
    out.prefill += seconds(dry.pass(left, 0, prompt, keys, source));
  // The cost of a token grows with the text: the token in the middle has the mean cost.
  if (shape.tokens > 1)
    out.decode = seconds(dry.pass(shape.batch, prompt + (shape.tokens - 1) / 2, 1, keys, source));
  const double all = out.prefill + out.decode * static_cast<double>(shape.tokens - 1);
  out.tokens_per_second = static_cast<double>(shape.batch * shape.tokens) / all;
  // The cache has room for whole texts.
  dry.pass(shape.batch, 0, prompt + shape.tokens - 1, keys, source);
  out.memory = dry.weight_bytes(run.precision.compute) + keys;
  const std::uint64_t room = machine.accelerator() ? machine.memory : machine.host.memory;
  const std::uint64_t needed =
      machine.accelerator() ? out.memory : out.memory * static_cast<std::uint64_t>(tensor);
  out.fits = room == 0 || needed <= room;
  return out;
}

std::vector<int> tensor_ranks(const config::Config& config, const config::Machine& machine,
                              std::int64_t vocabulary) {
  const models::GptConfig model = models::gpt_config(config, vocabulary);
  std::vector<int> out;
  for (int ranks = 1; ranks <= machine.devices; ranks *= 2)
    if (model.num_heads % ranks == 0 && (ranks == 1 || !model.norms_all_heads()) &&
        (!model.any_linear() || model.linear_attention.num_key_heads % ranks == 0))
      out.push_back(ranks);
  return out;
}

}  // namespace sherd::planning
