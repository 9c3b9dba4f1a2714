#include "engine/step/recompute.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "nn/layered_model.h"

namespace sherd::engine {
namespace {

/// Adds the blocks of `module` that lie in no other block, each once.
void add_blocks(nn::Module& module, std::vector<nn::Module*>& blocks) {
  if (module.is_block()) {
    if (std::find(blocks.begin(), blocks.end(), &module) == blocks.end()) blocks.push_back(&module);
    return;
  }
  for (const auto& [name, child] : module.children()) add_blocks(*child, blocks);
}

std::vector<nn::Module*> blocks_of(nn::Model& model, const StageLayout& layout) {
  std::vector<nn::Module*> blocks;
  if (auto* layered = dynamic_cast<nn::LayeredModel*>(&model)) {
    for (const sharding::Chunk& chunk : layout.all_own())
      for (std::size_t part = chunk.begin; part < chunk.end; ++part)
        for (const auto& module : layered->modules(part)) add_blocks(*module, blocks);
  } else {
    for (const auto& [name, child] : model.children()) add_blocks(*child, blocks);
  }
  return blocks;
}

}  // namespace

std::int64_t choose_blocks(nn::Model& model, const config::Training& training, const StageLayout& layout) {
  const std::vector<nn::Module*> blocks = blocks_of(model, layout);
  std::int64_t left =
      training.recompute_blocks < 0 ? std::numeric_limits<std::int64_t>::max() : training.recompute_blocks;
  for (nn::Module* block : blocks) {
    const bool recomputes = left-- > 0;
    block->for_each([&](nn::Module& each) { each.set_recomputes(recomputes); });
  }
  return std::ssize(blocks);
}

std::string describe_partial_recompute(const config::Config& config, std::int64_t blocks,
                                       const TrainSchedule& schedule) {
  const config::Training& training = config.training;
  if (training.recompute == Recompute::none) return {};
  std::string out;
  const auto add = [&](std::int64_t part, std::int64_t all, const char* what) {
    if (part >= 0)
      out += cat(out.empty() ? "recompute of " : ", of ", std::min(part, all), " of ", all, what);
  };
  add(training.recompute_blocks, blocks, " blocks");
  add(training.recompute_micro_batches, most_in_flight(schedule, config), " micro-batches in flight");
  return out.empty() || schedule.layout.stages == 1 ? out : cat(out, ", on the first stage");
}

}  // namespace sherd::engine
