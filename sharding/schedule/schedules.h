#pragma once

// This folder makes the lists of instructions that a step is. Schedules are data: pure functions make lists,
// the executor (engine/step/executor.cpp) runs them, simulate() prices them, tests read them. Passes are
// keyed by micro-batch and chunk, a run of the model's parts. A chunk's output is the next one's variable,
// and its gradient comes back unchanged, on the same rank or from stage to stage; so every schedule has the
// bits of one tape (a tied table's in fp32).
//
// To change, look at:
// - the order in which a stage computes: schedules.cpp; all that goes with it (receives, sends, gathers, the
//   update): step_list.cpp
// - where a model is cut between stages: cut()
// - how long a list takes: simulate.cpp; how many micro-batches it has in flight, and which keep their
//   activations: in_flight.cpp
// - which schedule runs: choose_schedule(), engine/pipeline/train_schedule.cpp

#include "config/config.h"
#include "sharding/instruction.h"

namespace sherd::sharding {

// The list of one step for one stage. Pure functions; all throw Error{config} for a shape that they cannot
// serve, naming the keys of section `parallel` (or the batch's) and values that would do. In all of them the
// micro-batches of a chunk come back, and form weight gradients, in ascending order, so that sums are formed
// in that order.

/// All micro-batches' forward, then all their backward, in ascending order (Huang et al. 2019, "GPipe").
std::vector<Instruction> gpipe(const ScheduleShape& shape);
/// One forward, one backward after a warm-up of min(stages − stage − 1, micro_batches) forwards: at most
/// stages − stage micro-batches are in flight (Narayanan et al. 2019, "PipeDream"; 2021, §2.2.1).
std::vector<Instruction> one_forward_one_backward(const ScheduleShape& shape);
/// The same over several chunks per stage, which divides the bubble by their number (Narayanan et al. 2021,
/// "Efficient large-scale language model training on GPU clusters", §2.2.2). Micro-batches pass the chunks in
/// groups, each of at least as many as there are stages; what the last stage gives a larger group waits for
/// the first one, so group − stages + 1 sends of one kind are under way, and must not hold their stage up.
std::vector<Instruction> interleaved(const ScheduleShape& shape);
/// 1F1B with backward split, weight gradients filling what would be bubbles: ZB-H1, which needs the memory of
/// 1F1B's first stage on all of them (Qi et al. 2024, "Zero bubble pipeline parallelism", §2.2).
std::vector<Instruction> zero_bubble(const ScheduleShape& shape);
/// All micro-batches pass a chunk before the next one, forward as backward, so that parameters come twice per
/// step whatever the accumulation: a chunk's begin to come while the chunk before it runs, and go behind its
/// last micro-batch. Those of the last two chunks come once. The last chunk's micro-batches go back at once,
/// so that logits of one are kept. One stage; chunks are the parts of the model.
std::vector<Instruction> layered(const ScheduleShape& shape);
/// accumulate() of each micro-batch, one after the other. One stage of one chunk.
std::vector<Instruction> accumulate(const ScheduleShape& shape);

/// The list of the schedule of that name, which is not `automatic`.
std::vector<Instruction> make_schedule(config::Schedule schedule, const ScheduleShape& shape);

/// Micro-batches that a list has in flight at once, at most: from the first forward of one to its last
/// backward, or to its last weight gradients where these were put off.
std::int64_t most_in_flight(std::vector<Instruction> list);

/// Marks the forwards of micro-batches that are to keep all activations where the others recompute: a
/// micro-batch that begins keeps them where fewer than `most` of those in flight do (Korthikanti et al. 2022,
/// "Reducing activation recomputation in large transformer models", "microbatch-level activation
/// recomputation"). With 1F1B these are the ones of Megatron-LM: the first `most` of each most_in_flight().
/// Returns how many keep them at once, at most.
std::int64_t keep_activations(std::vector<Instruction>& list, std::int64_t most);

/// Cuts a list of parts of those weights (none negative) into `chunks` runs that follow each other, none of
/// them empty, so that the largest sum of weights is as small as it can be, and the sums are otherwise as
/// even as they can be (least sum of squares). Of equal cuts the one that gives the first chunks less, as the
/// first stages of a pipeline hold the most micro-batches. A pure function. Throws Error{usage} for no
/// chunks, or fewer parts than chunks.
std::vector<Chunk> cut(const std::vector<std::int64_t>& weights, std::size_t chunks);

}  // namespace sherd::sharding
