#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "autograd/tape.h"
#include "device/trace_range.h"
#include "sharding/gradients/gradients.h"
#include "sharding/instruction.h"
#include "sharding/units/unit.h"

namespace sherd::sharding {

class ShardedModel;

/// One micro-batch's way through a sharded model: its tape, the leases of the blocks that run, and the
/// gradients that are open. Several may be under way at once, each on its own tape; their backward passes
/// begin in the order of the micro-batches, so that sums have that order. Used from the rank's thread.
///
/// A pass may go through some of the parts of a model (nn::LayeredModel) while others go through the rest.
///
///     pass.begin(parts, last); Var loss = model(pass.tape(), batch);
///     pass.begin_backward(loss, seed); while (pass.continue_backward()) {}
///     pass.end();
///     ... and behind the last pass of a step ShardedModel::finish_gradients()
class Pass {
 public:
  /// The model must outlive it.
  explicit Pass(ShardedModel& model);
  ~Pass();
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  /// The tape on which the model runs; outside of a pass without recording, for generation for example.
  autograd::Tape& tape() { return tape_; }
  /// Whether the pass has begun, and neither ended nor been abandoned.
  bool under_way() const { return under_way_; }
  /// The micro-batch is the last before an update.
  bool last() const { return last_; }

  // ---- training ----
  /// Before forward through `parts`, of those that this rank has; a model without parts has one. `last`: of
  /// the step's last micro-batch. Gradients of a unit are complete for the step, and replicated ones reduced,
  /// in the pass of that micro-batch which has the lowest of the parts that use the unit: backward comes
  /// there last. Outside of a list (ShardedModel::begin_list()) the first pass that begins while no other is
  /// under way abandons what an exception has left.
  void begin(const Chunk& parts, bool last);
  /// As Tape::begin_backward().
  void begin_backward(const autograd::Var& loss, double seed,
                      autograd::WeightGradients when = autograd::WeightGradients::now);
  void begin_backward(const std::vector<autograd::OutputGradient>& outputs,
                      autograd::WeightGradients when = autograd::WeightGradients::now);
  /// Runs on until a block's backward has ended, and has sent off the gradients that are complete; false once
  /// nothing is left.
  bool continue_backward() { return tape_.continue_backward(); }
  /// The same for weight gradients that backward has put off, after it.
  bool continue_weight_gradients() { return tape_.continue_weight_gradients(); }
  /// Returns when every gradient that this pass had to send has been summed over the shard group; that is all
  /// of the sum where there are no replicas. Collective.
  void end();

  // ---- evaluation ----
  /// Runs `run` on the tape, without recording and with dropout off. Leases are taken back where it throws.
  void evaluate(const std::function<void(autograd::Tape&)>& run);

 private:
  friend class Block;
  friend class ShardedModel;
  /// A unit's gradients in this pass.
  struct UnitState {
    int pending = 0;                         ///< uses in forward whose backward is still to come
    bool open = false;                       ///< its parameters take gradients
    bool sent = false;                       ///< its gradients were closed
    std::vector<Gradients::Open> gradients;  ///< per segment that trains, while open
  };
  /// A block that runs.
  struct Running {
    Running(const char* direction, const std::string& name) : range(direction, name) {}
    std::vector<Unit::Lease> leases;
    device::TraceRange range;
  };
  using Units = std::vector<Unit*>;

  void enter(const char* direction, const Units& units);
  void announce_next(const Unit& unit);
  void leave();
  void open_gradients(Unit& unit);
  void attach_gradients(Unit& unit);
  void detach_gradients(Unit& unit);
  void close_gradients(Unit& unit);
  /// Leases of units of which weights are pruned, while gradients that backward has put off are computed.
  void lease_pruned(const Units& units);
  /// Zeroes gradients of pruned weights, of units that are leased.
  void zero_pruned_gradients(const Units& units);
  /// Whether no other pass adds to the unit's gradients in this step.
  bool completes(const Unit& unit) const;
  UnitState& state(const Unit& unit) { return units_[static_cast<std::size_t>(unit.index())]; }
  /// Lets go of everything, after an exception.
  void abandon();

  ShardedModel& model_;
  autograd::Tape tape_;
  std::vector<UnitState> units_;
  std::deque<Running> running_;      ///< the innermost last
  std::vector<Unit::Lease> pruned_;  ///< lease_pruned()
  std::vector<Unit*> ran_;           ///< units on demand whose backward is to come, in the order of forward
  Chunk parts_;
  bool under_way_ = false, last_ = true;
};

/// Hangs on a block's module: whenever it runs, the pass whose tape it runs on takes leases of the block's
/// own unit and of units elsewhere whose parameters it shares, and sends their gradients off.
class Block final : public autograd::Scope {
 public:
  Block(ShardedModel& owner, std::vector<Unit*> units) : owner_(owner), units_(std::move(units)) {}

  void announce(autograd::Tape& tape) override;
  void pre_forward(autograd::Tape& tape) override;
  void post_forward(autograd::Tape& tape) override;
  void pre_backward(autograd::Tape& tape) override;
  void post_backward(autograd::Tape& tape) override;
  void pre_weight_gradients(autograd::Tape& tape) override;
  void gradients_complete(autograd::Tape& tape) override;

 private:
  Pass& pass_of(autograd::Tape& tape);

  ShardedModel& owner_;
  std::vector<Unit*> units_;
};

}  // namespace sherd::sharding
