#pragma once

#include <cstdint>
#include <vector>

#include "sharding/instruction.h"

namespace sherd::sharding {

/// Micro-batches that a list has in flight at once, at most: from the first forward of one to its last
/// backward, or to its last weight gradients where these were put off.
std::int64_t most_in_flight(std::vector<Instruction> list);

/// Marks the forwards of micro-batches that are to keep all activations where the others recompute: a
/// micro-batch that begins keeps them where fewer than `most` of those in flight do (Korthikanti et al. 2022,
/// "Reducing activation recomputation in large transformer models", "microbatch-level activation
/// recomputation"). With 1F1B these are the ones of Megatron-LM: the first `most` of each most_in_flight().
/// Returns how many keep them at once, at most.
std::int64_t keep_activations(std::vector<Instruction>& list, std::int64_t most);

}  // namespace sherd::sharding
