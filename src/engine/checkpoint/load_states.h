#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint.h"

namespace sherd::engine {

/// Throws Error{data} unless the checkpoint has what read_states() will read.
void require_states(const CheckpointReader& reader, const sharding::ShardedModel& model,
                    const std::vector<std::string>& moment_names);

/// Reads this rank's weights, from which the compute parameters follow, and moments. Calls no collective.
void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model,
                 const std::vector<std::string>& moment_names, device::Device& device);

/// Makes what modules see of what all ranks have read. Collective.
void publish_all(sharding::ShardedModel& model);

}  // namespace sherd::engine
