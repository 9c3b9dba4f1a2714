#pragma once

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/states.h"
#include "nn/weight_source.h"

namespace sherd::engine {

/// Throws Error{data} unless the checkpoint has what read_states() will read.
void require_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds);

/// Reads this rank's states of `kinds`; the compute parameters follow from the weights. Calls no collective.
void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds,
                 device::Device& device);

/// Reads this rank's weights, trained and frozen ones, from `source`. Calls no collective.
void read_weights(nn::WeightSource& source, const sharding::ShardedModel& model, device::Device& device);

/// Makes what modules see of what all ranks have read. Collective.
void publish_all(sharding::ShardedModel& model);

}  // namespace sherd::engine
