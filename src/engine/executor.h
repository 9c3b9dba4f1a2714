#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "engine/run_ahead.h"
#include "engine/step_loss.h"
#include "engine/step_update.h"
#include "nn/module.h"
#include "sharding/schedule/instruction.h"

namespace sherd::engine {

/// Runs the instructions of steps (sharding/schedule/) on one rank: the passes of micro-batches, and between
/// two blocks of a backward the updates that complete gradients allow. One per rank, used from its thread.
class Executor {
 public:
  /// What it works with, all of which must outlive it.
  struct Parts {
    const config::Config& config;
    nn::Model& model;
    sharding::ShardedModel& sharded;
    device::Device& device;
    comm::Communicator& data_ranks;
    StepUpdate& update;
    Counters& counters;  ///< of which it counts micro-batches and steps
  };
  explicit Executor(const Parts& parts);

  // ---- the calls of a micro-batch, each of which runs its part of the list ----
  /// Begins the list of the coming micro-batch.
  autograd::Var forward(const tensor::Batch& batch);
  void backward(const autograd::Var& loss);
  /// Counts the micro-batch, and updates where it was the last of its step: true then. What was accumulated
  /// goes, also where an update throws.
  bool step();
  /// Of the last step; `applied` is false again from the next micro-batch on.
  const StepReport& report() const { return report_; }

  /// Runs `forward` without recording, with dropout off.
  void evaluate(const std::function<void(autograd::Tape&)>& run);
  /// The loss of `batch` in an evaluation.
  autograd::Var evaluate(const tensor::Batch& batch);

  // ---- accumulation ----
  /// As Engine::set_gradient_accumulation_boundary().
  void set_boundary(bool boundary) { boundary_ = boundary; }
  bool is_boundary() const;
  /// Micro-batches since the last update.
  std::int64_t accumulated() const { return accumulated_; }
  /// Between micro-batches: nothing is to be done before the next forward.
  bool idle() const { return list_.empty(); }
  /// A backward was begun, and has not ended but with an exception.
  bool failed() const { return begun_.has_value(); }
  /// Ends the passes of a failed micro-batch, with the transfers that replicas began in it. Throws what these
  /// fail with.
  void abandon_failed();
  /// Forgets the micro-batch under way and all before it: a checkpoint is going to be loaded.
  void reset();

 private:
  using Op = sharding::Instruction::Op;
  bool next_is(Op op) const { return !list_.empty() && list_.front().op == op; }
  void run_backward(const sharding::Instruction& instruction, const autograd::Var& loss);
  void run_update();
  void drop_accumulated();
  void require_not_failed(const char* call) const;
  RandomKey key() const;
  std::int64_t coming_step() const { return parts_.counters.global_steps + 1; }
  void end_phase();

  Parts parts_;
  sharding::Pass pass_, evaluation_;
  RunAhead run_ahead_;
  StepLoss loss_;
  StepTimes times_;  ///< of the step under way
  StepReport report_;
  std::deque<sharding::Instruction> list_;      ///< what is left of the micro-batch under way
  std::optional<sharding::Instruction> begun_;  ///< of it, what has begun and not ended
  std::optional<bool> boundary_;                ///< said by the caller
  std::int64_t accumulated_ = 0;
};

}  // namespace sherd::engine
