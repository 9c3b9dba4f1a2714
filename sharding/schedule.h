#pragma once

#include <cstdint>
#include <vector>

namespace sherd::sharding {

/// One thing that a rank does for a step. All ranks run lists that fit together, each from its thread, in
/// order.
struct Instruction {
  enum class Op : std::uint8_t {
    forward,       ///< runs the model on the micro-batch
    share_loss,    ///< ranks tell each other the losses of all micro-batches so far; nobody waits for it yet
    begin_update,  ///< what states need to be updated begins to come; parameters may change from here on
    backward,      ///< gradients; those that are complete are sent off, and updated where an update has begun
    reduce,        ///< all gradients of the micro-batch are summed
    count,         ///< the micro-batch is done
    update         ///< clips, updates what is left, publishes parameters
  };
  Op op;
  std::int64_t micro_batch;  ///< of the step, from 0; of `update`, the last one
  bool operator==(const Instruction&) const = default;
};

/// What `accumulate` does for one micro-batch of a step: a step is these lists, one after the other, up to
/// the one that `ends_step`. With `early_update` nothing decides about the update but the loss, so it begins
/// beside that backward. A pure function.
std::vector<Instruction> accumulate(std::int64_t micro_batch, bool ends_step, bool early_update);

}  // namespace sherd::sharding
