#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/update/optimizer.h"
#include "engine/update/update_buffers.h"
#include "engine/update/update_plan.h"
#include "sharding/sharded_model.h"

// This folder takes complete gradients to new parameters. A chunk's way:
//
//   step_update.h       decides: overflow, norm, scale, clipping; whether the update begins beside backward,
//                       or ends beside the next step; what is left of the weights where one fails
//   update_chunk.h      how segments are cut into chunks
//   update_plan.h       what is done, as a list: reads, passes over elements, exchanges, writes
//   update_pipeline.h   runs that list; late_update.cpp: what is left for beside the next step
//   update_buffers.h    host memory through which chunks on NVMe pass
//   rule_update.h       what a pass does: moments, masters and compute parameters of a view in one go, with
//                       the masters rounded by optim/ (UpdateContext: by which rates)
//   pass_runner.h       where it is done: on the processor, on a GPU, or on the processor beside a GPU, to
//                       which gradients come in parts (update_staging.h)
//   pruned_weights.h    keeps pruned weights zero, around any rule's pass
//   optimizer.h         rules, rates and counts; parameter_groups.h: whose they are, and what Muon and 8-bit
//                       AdamW leave to AdamW (companion_groups.cpp)
//   rules/              what some rules need beside that one pass (rules/rule_updates.h)
//
// To add an optimizer: a rule in optim/rules/ and its keys; nothing here, unless it needs more than elements.

namespace sherd::engine {

/// How the pipeline is dimensioned; the names are those of `zero_optimization` and its `offload_optimizer`.
struct UpdatePipelineOptions {
  std::int64_t sub_group_size = 1'000'000'000;  ///< elements of a chunk at most
  int buffer_count = 4;
  bool pipeline_read = true, pipeline_write = true;
  std::vector<optim::Description> rules = {{}};  ///< that update the segments; SegmentKey::rule counts them
};

/// Updates all trainable segments of a model, wherever their states live. The result does not depend on any
/// option, nor on when updates begin. One per rank, used from its thread.
///
/// A step may begin before all gradients are there: then chunks follow each other in the order in which the
/// step before saw gradients complete (canonical order at first, and after those for what was left out), and
/// those at the head are updated as soon as their gradients and reads allow. Collectives wait for finish(),
/// so that no rank depends on another's drive.
///
/// It may also end later: after leave() weights are updated unit by unit (update_units()), beside the next
/// step's forward, and poll() goes ahead of that as far as transfers allow.
class UpdatePipeline {
 public:
  /// Takes its buffers, if any state lives on NVMe: host memory, as many bytes as buffer_bytes() says.
  UpdatePipeline(sharding::ShardedModel& model, const sharding::StateSources& sources,
                 const UpdatePipelineOptions& options);

  /// begin() and finish().
  void run(Optimizer& optimizer, double factor);

  /// Opens a step, with gradients to be multiplied by `factor`, and starts the first reads. Both must last
  /// until its end. With a factor, Optimizer::begin_step() has been called; without one nothing is updated
  /// before decide(), and it is called before that.
  void begin(Optimizer& optimizer, std::optional<double> factor);
  void decide(double factor) { step_->factor = factor; }
  /// Called between begin() and finish(): the gradients of `segment` are complete, and nobody reads its
  /// parameters any more, in the order of the device's work. Updates what can be updated without waiting.
  /// Throws what finish() throws.
  void gradients_complete(const sharding::Segment& segment);
  /// All gradients are complete: updates the rest.
  void update_rest();
  /// update_rest(), publishes each segment when its last chunk is done, ends the model's step, and returns
  /// when everything is written; new parameters are where they belong in the order of the device's work.
  /// Throws Error{numerics} when an updated weight is NaN or infinite (what a GPU updates,
  /// Optimizer::finite() tells), and the store's errors. Collective where parameters are replicated.
  void finish();
  /// Instead of finish(): the rest is for update_units(). Until then nobody gathers these parameters
  /// (ShardedModel::begin_changes()), and gradients stay as they are.
  void leave();
  /// After leave(): parameters of these units are new, published, and may be gathered, on return. Writes may
  /// be under way still. Throws what finish() throws. Collective where parameters are replicated.
  void update_units(std::span<sharding::Unit* const> units);
  /// Goes on without waiting, where a step is open.
  void poll();
  /// After leave(): everything is updated and written. Collective as update_units().
  void complete();
  /// Ends a step that an exception left open; waits for transfers, at most the store's deadline.
  void abandon() noexcept;

  bool under_way() const { return step_.has_value(); }
  /// Whether an update is open whose factor is known, so that weights may change.
  bool decided() const { return step_ && step_->factor; }
  /// Chunks of which the step under way has begun to change the weights.
  std::int64_t updated() const { return step_ ? step_->updated : 0; }
  /// Whether it has begun to change weights or states.
  bool changed() const { return step_ && step_->changed; }

  const std::vector<UpdateInstruction>& plan() const { return plan_; }
  /// The bytes that one chunk takes while it is in memory; 0 when all states always are.
  std::size_t buffer_bytes() const { return buffers_.bytes(); }

 private:
  /// A segment whose gradients are complete from a point of the device's work on.
  struct Complete {
    const sharding::Segment* segment;
    device::Event ready;
  };
  struct Step {
    Optimizer& optimizer;
    std::optional<double> factor;
    std::size_t next = 0;                         ///< instruction
    std::size_t announced = 0;                    ///< instructions up to here, those of passes among them
    std::int64_t updated = 0;                     ///< chunks
    bool changed = false;                         ///< weights or states
    std::vector<Complete> complete{};             ///< in the order of their completion
    std::optional<device::Event> all_complete{};  ///< the point from which on all are
    std::vector<sharding::Segment*> unpublished{};
    bool publishes = false;  ///< ranks have come to where they may make collectives
    bool late = false;       ///< leave() was called
  };
  std::vector<UpdateInstruction> make_plan(std::int64_t step);
  optim::Phase phase_of(const UpdateInstruction& instruction) const {
    return chunks_[instruction.chunk].phases[static_cast<std::size_t>(instruction.phase)];
  }
  void advance(bool wait);
  bool perform(const UpdateInstruction& instruction, bool wait);
  bool may_pass(const UpdateChunk& chunk, bool wait);
  void pass(const UpdateInstruction& instruction);
  void note_change(const UpdateInstruction& instruction);
  void publish(sharding::Segment& segment);
  void all_complete();
  const device::Event* ready(const sharding::Segment& segment, bool wait);
  void announce_passes();
  void follow_completion();
  void update_through(const sharding::Segment& segment);  // late_update.cpp, as end_late()
  void end_late(bool wait);

  sharding::ShardedModel& model_;
  tensor::Kernels& kernels_;
  UpdatePipelineOptions options_;
  std::vector<sharding::Segment*> order_;
  std::vector<UpdateChunk> chunks_;
  std::vector<UpdateInstruction> plan_;
  UpdateBuffers buffers_;
  std::optional<Step> step_;  ///< none: no update is under way
};

}  // namespace sherd::engine
