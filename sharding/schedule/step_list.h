#pragma once

#include "sharding/instruction.h"

namespace sherd::sharding {

/// Forward, backward, backward_input and weight_gradients of a step, in the order in which a rank computes
/// them: what tells one schedule from another.
using ComputeOrder = std::vector<Instruction>;

/// Whose parameters `gather` and `release` bring.
enum class Gathers {
  by_block,  ///< each block's own, as it runs: the list has none
  by_chunk   ///< a chunk's, for all that runs on it in a row
};

/// The step in which a rank computes in that order, with all that goes with it:
/// - receives are posted one computation ahead of the one that needs them, but a gradient's never before the
///   forward whose output it belongs to; sends follow their computation;
/// - with `by_chunk`, parameters begin to come a chunk ahead, and go behind the last use in a row, unless the
///   chunk after the next one is the same (where forward turns back);
/// - update_chunk comes before the first use of the chunk's parameters; with `by_chunk` they begin to come
///   behind it, in the middle of the run on the chunk before;
/// - losses are shared, and an early update begins, before the last micro-batch's first backward: the last
///   stage knows all losses there, the others have to wait there for the gradient anyway, and no gradient is
///   complete before;
/// - gradients are sent off as they complete; that they are summed is waited for once, before the update.
std::vector<Instruction> complete_step(const ScheduleShape& shape, const ComputeOrder& order,
                                       Gathers gathers = Gathers::by_block);

}  // namespace sherd::sharding
