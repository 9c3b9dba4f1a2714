#pragma once

#include <cstdint>
#include <string>

#include "engine/pipeline/train_schedule.h"

namespace sherd::engine {

/// Of the blocks that this rank runs, in the order of the model's parts (of another model: of its
/// declarations), has the first `training.recompute_blocks` recompute, and the others keep all that they
/// make. What lies within a block goes with it. Returns how many blocks there are.
std::int64_t choose_blocks(nn::Model& model, const config::Training& training, const StageLayout& layout);

/// What recomputes, for the log; empty where nothing does, or all. `blocks`: of this rank.
std::string describe_partial_recompute(const config::Config& config, std::int64_t blocks,
                                       const TrainSchedule& schedule);

}  // namespace sherd::engine
