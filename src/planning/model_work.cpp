#include "planning/model_work.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "base/error.h"
#include "engine/pipeline/stage_layout.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "planning/fit.h"
#include "sharding/schedule/schedules.h"

namespace sherd::planning {
namespace {

using engine::ModelWork;
using engine::PartWork;
using models::GptConfig;

/// The traits of a block that depend on its index and decide about its work: whether it has experts, its type
/// of attention, whether it has rotary positions, and whether it is an encoder's in front of a decoder.
using Kind = std::tuple<bool, config::LayerType, bool, bool>;
Kind kind_of(const config::Model& shape, std::int64_t block) {
  return {shape.moe.in(block), shape.layer_type(block), shape.rotates(block), shape.encodes(block)};
}

/// Blocks of the model among which every kind is, to be recorded in their place: one of each where a pattern
/// of types is all that tells them apart, else those from the first on.
std::vector<std::int64_t> blocks_of_all_kinds(const GptConfig& shape) {
  std::set<Kind> kinds;
  std::set<std::pair<bool, bool>> others;  // whatever their types
  std::vector<std::int64_t> first;
  for (std::int64_t i = 0; i < shape.num_layers; ++i) {
    others.emplace(shape.moe.in(i), shape.rotates(i));
    if (kinds.insert(kind_of(shape, i)).second) first.push_back(i);
  }
  if (others.size() == 1) return first;
  std::vector<std::int64_t> out(static_cast<std::size_t>(first.back()) + 1);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

std::vector<PartWork> record_blocks(config::Config config, std::int64_t vocabulary,
                                    const std::vector<std::int64_t>& blocks) {
  config::Model& model = *config.model;
  std::vector<config::LayerType> types;
  if (model.sliding_window > 0 || model.any_linear())
    for (const std::int64_t block : blocks) types.push_back(model.layer_type(block));
  model.encoder.num_layers =
      std::count_if(blocks.begin(), blocks.end(), [&](std::int64_t block) { return model.encodes(block); });
  model.num_layers = std::ssize(blocks), model.layer_types = std::move(types);
  config.training.recompute_blocks = -1;
  const GptConfig shape = models::gpt_config(config, vocabulary);
  const std::int64_t rows = config.batch.micro_batch_size;
  return engine::record_parts(
      config, [&](const parallel::Layout& layout) { return std::make_shared<models::Gpt>(shape, layout); },
      [&](device::Device& device) { return dry_batch(config, rows, device); });
}

std::string key_of(const config::Config& config) {
  const config::Parallel& parallel = config.parallel;
  const config::Training& training = config.training;
  return cat(parallel.tensor, ' ', parallel.sequence_parallel, ' ', parallel.context, ' ',
             static_cast<int>(parallel.context_method), ' ', parallel.expert, ' ',
             config.batch.micro_batch_size, ' ', static_cast<int>(training.recompute), ' ',
             training.recompute_blocks, ' ', training.cpu_checkpointing,
             training.recompute_micro_batches >= 0 ? " of some" : "",
             training.recompute_blocks < 0 ? "" : cat(' ', parallel.pipeline, ' ', parallel.virtual_stages));
}

}  // namespace

config::Config placed_on(const config::Machine& machine, config::Config config) {
  if (machine.accelerator() && config.device.type == config::DeviceType::automatic)
    config.device.type = config::DeviceType::cuda;
  return config;
}

config::Config as_run_on(const config::Machine& machine, config::Config config, int ranks) {
  config.batch = config::resolve_batch(config, engine::data_ranks(config, ranks));
  return placed_on(machine, std::move(config));
}

const ModelWork& GptWork::of(const config::Config& config) {
  if (weights_.empty() || cut_by_ != config.parallel.partition_method) {
    models::Gpt whole(models::gpt_config(config, vocabulary_));
    whole.assign_names();
    weights_ = engine::part_weights(whole, cut_by_ = config.parallel.partition_method);
  }
  const auto [at, added] = recorded_.try_emplace(key_of(config));
  if (!added) return at->second;
  try {
    at->second = record(config);
    at->second.weights = weights_;
  } catch (...) {
    recorded_.erase(at);
    throw;
  }
  return at->second;
}

/// The pipeline stage of each part.
std::vector<int> GptWork::stages_of_parts(const config::Parallel& parallel) const {
  std::vector<int> out;
  const int stages = parallel.pipeline;
  const auto chunks = sharding::cut(weights_, static_cast<std::size_t>(stages * parallel.virtual_stages));
  for (std::size_t c = 0; c < chunks.size(); ++c)
    out.insert(out.end(), chunks[c].end - chunks[c].begin, static_cast<int>(c) % stages);
  return out;
}

ModelWork GptWork::record(const config::Config& config) const {
  const GptConfig shape = models::gpt_config(config, vocabulary_);
  const std::int64_t layers = shape.num_layers;
  const std::vector<std::int64_t> some = blocks_of_all_kinds(shape);
  ModelWork out;
  out.kinds = record_blocks(config, vocabulary_, some);
  const std::size_t around = out.kinds.size() - some.size();  // parts that are no block
  require(around >= 2, "a transformer has parts before and behind its blocks");
  // A block that keeps all where others recompute, or other micro-batches do, is another kind.
  std::size_t kept = 0;
  const std::int64_t recomputed = config.training.recompute_blocks;
  const bool some_blocks = recomputed >= 0 && recomputed < layers,
             some_micro_batches = config.training.recompute_micro_batches >= 0;
  if (some_blocks || some_micro_batches) {
    config::Config keeping = config;
    keeping.training.recompute = Recompute::none;
    kept = out.kinds.size();
    for (PartWork& part : record_blocks(std::move(keeping), vocabulary_, some))
      out.kinds.push_back(std::move(part));
  }
  const std::size_t before = around - 1;
  for (std::size_t i = 0; i < before; ++i) out.parts.push_back(i);
  // Each stage recomputes the first of its own.
  const std::vector<int> stages = some_blocks ? stages_of_parts(config.parallel) : std::vector<int>();
  std::vector<std::int64_t> seen(static_cast<std::size_t>(config.parallel.pipeline));
  for (std::int64_t i = 0; i < layers; ++i) {
    std::size_t like = 0;
    while (kind_of(shape, some[like]) != kind_of(shape, i)) ++like;
    const bool keeps =
        some_blocks && seen[static_cast<std::size_t>(stages[out.parts.size()])]++ >= recomputed;
    out.parts.push_back(before + like + (keeps ? kept : 0));
  }
  out.parts.push_back(before + some.size());
  if (some_micro_batches)
    for (const std::size_t kind : out.parts) out.keeping.push_back(kind < kept ? kind + kept : kind);
  return out;
}

}  // namespace sherd::planning
