#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/pipeline/stage_link.h"
#include "engine/setup/resources.h"
#include "engine/step/chunk_runner.h"
#include "engine/step/flights.h"
#include "engine/step/recompute.h"
#include "engine/step/step_loss.h"
#include "engine/step/step_report.h"
#include "engine/step/step_states.h"
#include "engine/update/step_update.h"
#include "nn/module.h"

// This folder runs the instructions of a step (sharding/schedule/) on one rank.
//
//   executor.h              the list, one instruction after the other; micro-batches, boundaries, what
//                           follows an error
//   chunk_runner.h          forward and backward of chunks of the model; flights.h: those under way, and how
//                           far the thread runs ahead of a GPU
//   step_loss.h             what micro-batches weigh, and the mean of their losses over ranks and stages
//   step_states.h           what modules learn once per step beside gradients (biases of routers)
//   metric_sums.h           what is evaluated beside the loss
//   recompute.h             which blocks recompute (which micro-batches do stands in the list), and
//                           the inputs of recomputed blocks, on NVMe
//   step_report.h           what a step tells, and the counters

namespace sherd::engine {

/// Runs the instructions of steps (sharding/schedule/) on one rank: chunks of the model on micro-batches, and
/// between two blocks of a backward the updates that complete gradients allow. One per rank, used from its
/// thread.
class Executor {
 public:
  /// All must outlive it. `layout`: of the stages of a pipeline. Collective over these.
  Executor(const config::Config& config, nn::Model& model, sharding::ShardedModel& sharded,
           const StageLayout& layout, StepUpdate& update, const Resources& resources);

  // ---- the calls of a micro-batch, each of which runs its part of the list `accumulate` ----
  /// Begins the list of the coming micro-batch.
  autograd::Var forward(const tensor::Batch& batch);
  void backward(const autograd::Var& loss);
  /// Counts the micro-batch, and updates where it was the last of its step: true then. What was accumulated
  /// goes, also where an update throws.
  bool step();

  // ---- a step at once ----
  /// Gives the batches of a step in order, as they are needed.
  using Next = std::function<tensor::Batch()>;
  /// Runs a whole step's list over the chunks of `layout`, which outlives the call. Where it throws before a
  /// backward or in the update, what was accumulated is dropped; in between it has failed(), as a backward()
  /// that throws. On several stages the others are told why then, and no transfer works any more.
  void run(const std::vector<sharding::Instruction>& list, const StageLayout& layout, const Next& next);

  /// The last step's; `applied` is false again from the next micro-batch on.
  const StepReport& report() const { return report_; }
  /// How far training has come.
  Counters& counters() { return counters_; }
  const Counters& counters() const { return counters_; }
  /// Null: nobody. Must outlive its use.
  void set_observer(InstructionObserver* observer) { observer_ = observer; }

  /// Runs `run` without recording, with dropout off.
  void evaluate(const std::function<void(autograd::Tape&)>& run);
  /// The loss of `batch` in an evaluation; undefined on stages without the model's last part.
  autograd::Var evaluate(const tensor::Batch& batch);

  // ---- accumulation ----
  /// As Engine::set_gradient_accumulation_boundary().
  void set_boundary(std::optional<bool> boundary) { boundary_ = boundary; }
  bool is_boundary() const;
  /// The caller has said where a step ends, or has begun one by forward(): only that can end it.
  bool by_micro_batches() const { return boundary_ || accumulated_ > 0; }
  /// Micro-batches since the last update.
  std::int64_t accumulated() const { return accumulated_; }
  /// Between micro-batches: nothing is to be done before the next forward.
  bool idle() const { return list_.empty(); }
  /// A backward was begun, and has not ended but with an exception.
  bool failed() const { return failed_; }
  /// Ends the passes of a failed micro-batch, with the transfers that replicas began in it. Throws what these
  /// fail with.
  void abandon_failed();
  /// Forgets the micro-batch under way and all before it: a checkpoint is going to be loaded.
  void reset();

 private:
  using Instruction = sharding::Instruction;
  using Op = Instruction::Op;
  bool next_is(Op op) const { return !list_.empty() && list_.front().op == op; }
  void set_list(const std::vector<Instruction>& list, const StageLayout& layout);
  void begin_gathers(const std::vector<Instruction>& list);
  void run_next();
  void execute(const Instruction& instruction);
  void run_forward(const Instruction& instruction);
  void run_backward(const Instruction& instruction);
  void run_weight_gradients(const Instruction& instruction);
  void hand_over_complete();
  void reduce(const Instruction& instruction);
  void count();
  void run_update();
  void abort();
  void drop_accumulated();
  void require_not_failed(const char* call) const;
  const tensor::Batch& batch_of(std::int64_t micro_batch);
  RandomKey random_key(std::int64_t micro_batch) const;
  std::int64_t coming_step() const { return counters_.global_steps + 1; }
  void end_phase();

  const config::Config& config_;
  nn::Model& model_;
  sharding::ShardedModel& sharded_;
  StepUpdate& update_;
  device::Device& device_;
  comm::Communicator& data_ranks_;
  const StageLayout whole_;                          ///< one chunk, for `accumulate`
  StepStates states_;                                ///< that modules have beside their parameters
  std::unique_ptr<StageLink> link_;                  ///< null with one stage
  std::unique_ptr<ModelStages> in_stages_;           ///< for evaluations; null with one stage
  std::unique_ptr<SavedInputsOnNvme> saved_inputs_;  ///< for full recompute; null where they are not on NVMe
  Counters counters_;
  ChunkRunner chunks_;
  sharding::Pass evaluation_;
  RunAhead run_ahead_;
  StepLoss loss_;
  InstructionObserver* observer_ = nullptr;
  StepTimes times_, busy_;  ///< the step's so far
  StepReport report_;

  // ---- the list under way ----
  std::deque<Instruction> list_;  ///< instructions still to be run
  const StageLayout* layout_ = &whole_;
  std::int64_t last_ = -1;  ///< the step's last micro-batch; −1: another list has it
  bool ends_late_ = false;  ///< the step after it ends the update
  Next next_;
  std::map<std::int64_t, tensor::Batch> batches_;  ///< that are still needed
  std::map<std::int64_t, double> weights_;         ///< weights of losses, by micro-batch of the list
  std::int64_t batches_read_ = 0;
  std::vector<sharding::Segment*> complete_;  ///< that no update has taken up yet
  autograd::Var loss_of_forward_;             ///< the last forward's result
  bool failed_ = false;
  std::optional<bool> boundary_;  ///< said by the caller
  std::int64_t accumulated_ = 0;
};

}  // namespace sherd::engine
