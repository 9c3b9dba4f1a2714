#include <algorithm>

#include "comm/grid.h"
#include "engine/estimate/step_time.h"
#include "engine/setup/process_grid.h"
#include "sharding/placement.h"
#include "sharding/schedule/schedules.h"

namespace sherd::engine {
namespace {

using device::Tier;
using sharding::Placement;

/// The states of one part's parameters on a rank, by tier.
class States {
 public:
  States(const config::Config& config, const comm::Grid& grid)
      : moments_(moments_of(config)), table_(sharding::make_placements(config)), grid_(grid) {}

  RoughMemory of(const PartWork& part) const {
    RoughMemory out;
    const double shards = grid_.size(comm::Axis::shard), expert_shards = grid_.size(comm::Axis::expert_shard);
    const double trained = static_cast<double>(part.trained), experts = static_cast<double>(part.experts);
    const auto add = [&](const Placement& placement, double frozen, double copies) {
      const bool cut = placement.spread == sharding::Spread::sharded;
      const double elements = (trained + frozen) / (cut ? shards : 1) + experts / (cut ? expert_shards : 1);
      const double bytes = copies * elements * static_cast<double>(size_of(placement.dtype));
      if (placement.tier == Tier::device) out.device += bytes;
      if (placement.tier == Tier::host) out.host += bytes;
    };
    add(table_.parameters, static_cast<double>(part.frozen), 1);
    add(table_.gradients, 0, 1);
    if (table_.master_form != sharding::MasterForm::in_parameters) add(table_.masters, 0, 1);
    add(table_.moments, 0, moments_);
    return out;
  }

 private:
  /// Moments per weight: Adam's two. Other optimizers' are not counted, as some have fewer, or smaller ones.
  static double moments_of(const config::Config& config) {
    using enum config::OptimizerType;
    return config.optimizer.type == adam || config.optimizer.type == adamw ? 2 : 0;
  }

  double moments_;
  sharding::PlacementTable table_;
  const comm::Grid& grid_;
};

/// Micro-batches whose activations the first stage holds (Narayanan et al. 2021, §2.2.2; a later stage holds
/// less).
double in_flight(const config::Config& config) {
  const double stages = config.parallel.pipeline, chunks = config.parallel.virtual_stages;
  const double micro_batches = static_cast<double>(config.batch.gradient_accumulation_steps);
  if (config.parallel.schedule == config::Schedule::gpipe ||
      config.parallel.schedule == config::Schedule::layered)
    return micro_batches;
  return std::min(micro_batches, chunks > 1 ? stages * (1 + (stages - 1) / (stages * chunks)) : stages);
}

}  // namespace

RoughMemory rough_memory(const config::Config& config, const ModelWork& model, int ranks) {
  const comm::Grid grid(ranks, grid_sizes(config));
  const States states(config, grid);
  std::vector<RoughMemory> kinds;
  for (const PartWork& part : model.kinds) kinds.push_back(states.of(part));
  const auto stages = static_cast<std::size_t>(config.parallel.pipeline);
  const auto chunks =
      sharding::cut(model.weights, stages * static_cast<std::size_t>(config.parallel.virtual_stages));
  const bool layered = config.parallel.schedule == config::Schedule::layered;
  RoughMemory fullest;
  for (const std::size_t stage : {std::size_t{0}, stages - 1}) {
    RoughMemory sum;
    double saved = 0;
    for (std::size_t c = stage; c < chunks.size(); c += stages)
      for (std::size_t part = chunks[c].begin; part < chunks[c].end; ++part) {
        const RoughMemory& each = kinds[model.parts[part]];
        sum.device += each.device, sum.host += each.host;
        // A layered step ends with the last part of each micro-batch in turn.
        const bool in_turn = layered && part + 1 == model.parts.size();
        saved += static_cast<double>(model.part(part).saved) / (in_turn ? in_flight(config) : 1);
      }
    sum.device += saved * (stage == 0 ? in_flight(config) : 1);
    fullest.device = std::max(fullest.device, sum.device);
    fullest.host = std::max(fullest.host, sum.host);
  }
  return fullest;
}

}  // namespace sherd::engine
