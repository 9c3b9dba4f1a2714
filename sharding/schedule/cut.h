#pragma once

#include <cstdint>
#include <vector>

#include "sharding/instruction.h"

namespace sherd::sharding {

/// Cuts a list of parts of those weights (none negative) into `chunks` runs that follow each other, none of
/// them empty, so that the largest sum of weights is as small as it can be, and the sums are otherwise as
/// even as they can be (least sum of squares). Of equal cuts the one that gives the first chunks less, as the
/// first stages of a pipeline hold the most micro-batches. A pure function. Throws Error{usage} for no
/// chunks, or fewer parts than chunks.
std::vector<Chunk> cut(const std::vector<std::int64_t>& weights, std::size_t chunks);

}  // namespace sherd::sharding
