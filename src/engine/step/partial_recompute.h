#pragma once

#include <cstdint>
#include <string>

#include "engine/pipeline/train_schedule.h"

namespace sherd::engine {

/// Has the first `training.recompute_blocks` blocks of this rank recompute, in the order of the model's parts
/// (of another model: of its declarations); the others keep all that they make. Blocks within a block go with
/// it. Returns how many blocks there are.
std::int64_t choose_blocks(nn::Model& model, const config::Training& training, const StageLayout& layout);

/// A line for the log on what recomputes; empty where nothing does, or all. `blocks`: of this rank.
std::string describe_partial_recompute(const config::Config& config, std::int64_t blocks,
                                       const TrainSchedule& schedule);

}  // namespace sherd::engine
