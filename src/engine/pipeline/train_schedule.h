#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "engine/pipeline/stage_layout.h"
#include "nn/module.h"
#include "sharding/instruction.h"

// This folder says which list of instructions a step has, and what the stages of a pipeline pass on.
//
//   train_schedule.h  which schedule a configuration gets, and its list; what a run tells of it
//   stage_layout.h    which parts of the model each pipeline stage has (part_weights()); forms of values
//   stage_link.h      activations and gradients between neighbours, beside the rank's thread; ModelStages:
//                     the model whole over the stages, for evaluation and generation
//
// To add a schedule: its order in sharding/schedule/schedules.cpp, its name in config/config.h (Schedule) and
// config/sections/pipeline_keys.cpp; what it needs of the model is checked in choose_schedule().

namespace sherd::engine {

/// The schedule that train_batch() runs.
struct TrainSchedule {
  config::Schedule schedule = config::Schedule::accumulate;  ///< never automatic
  StageLayout layout;

  /// train_batch() is forward(), backward() and step() in a loop. `by_micro_batches`: the caller has said
  /// where the step ends, or has begun it so; throws Error{usage} where the configuration asks for a schedule
  /// that cannot go by that.
  bool runs_micro_batches(const config::Config& config, bool by_micro_batches) const;
  /// Throws Error{usage} where the configuration asks for another schedule than that of forward(), on one
  /// stage.
  void require_micro_batches(const config::Config& config) const;
};

/// All of a model on one stage, as one chunk.
StageLayout whole_model(const nn::Model& model);

/// The schedule that a configuration asks for, or what `automatic` comes to. `layout`: of the pipeline; with
/// one stage of one chunk, `layered` cuts the model into its parts. `shards`: ranks that share the states of
/// a parameter. Throws Error{config} naming keys that would do, for a schedule that model or pipeline cannot
/// have, and for a model to be cut of which a parameter belongs to no part. Parameters have their names.
TrainSchedule choose_schedule(const config::Config& config, const nn::Model& model, StageLayout layout,
                              int shards);
/// The same by the configuration alone. With one stage `automatic` becomes `layered` where each of several
/// micro-batches would fetch the parameters again (from other ranks, host memory or NVMe), and full recompute
/// of everything leaves little of the micro-batches to be kept; but only where the model goes `by_parts`,
/// which have all parameters and share none: sums of a shared one's gradient would agree to rounding only,
/// and neither tier nor number of ranks may decide about bits.
config::Schedule schedule_of(const config::Config& config, bool by_parts, int shards);

/// Micro-batches that the fullest stage has in flight at once: the first one.
std::int64_t most_in_flight(const TrainSchedule& schedule, const config::Config& config);

/// The instructions of a step on this rank. Only `layered` ends updates late. With
/// `training.recompute_micro_batches` = r, as many micro-batches keep their activations on each stage as on
/// the fullest one, which has r more in flight.
std::vector<sharding::Instruction> make_list(const TrainSchedule& schedule, const config::Config& config,
                                             bool early_update, bool late_update);

/// The bubble of a pipeline's schedule (sharding::SimulatedStep), where parts take the time of their
/// part_weights() by "best", products of backward that of forward each, and transfers none.
double ideal_bubble(const TrainSchedule& schedule, const config::Config& config, nn::LayeredModel& model);

/// The line that tells of a run's schedule before it starts: a pipeline's bubble; with one stage how often
/// parameters come, and what another schedule would do about it. Empty where there is nothing to choose.
std::string describe_schedule(const TrainSchedule& schedule, const config::Config& config, nn::Model& model,
                              int shards);

}  // namespace sherd::engine
