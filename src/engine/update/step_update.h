#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/step/step_loss.h"
#include "engine/step/step_report.h"
#include "engine/update/update_pipeline.h"
#include "optim/clipping.h"
#include "optim/loss_scaler.h"

namespace sherd::engine {

class Resources;

/// Decides about the update of a step and runs it, from the first gradients that allow it to published
/// weights; knows what is left of the weights where one fails. One per rank, used from its thread.
class StepUpdate {
 public:
  /// All must outlive it.
  StepUpdate(const config::Config& config, sharding::ShardedModel& model, Optimizer& optimizer,
             const Resources& resources);
  ~StepUpdate();
  StepUpdate(const StepUpdate&) = delete;
  StepUpdate& operator=(const StepUpdate&) = delete;

  /// Whether an update needs nothing that is known only after backward, and has transfers to hide behind it.
  static bool may_begin_early(const config::Config& config);
  /// The factor by which the loss is multiplied before backward.
  double seed() const { return loss_scale() * average_scale().seed; }
  /// Null without loss scaling.
  optim::LossScaler* scaler() { return scaler_ ? &*scaler_ : nullptr; }

  /// Ends what is left of the step before; then, where nothing but the loss decides about the update, opens
  /// it beside backward, with the rates of this moment; else only starts to read what it needs.
  void begin();
  /// These segments' gradients will not change any more; begins to update them where an update is open,
  /// unless `mean_loss()` is NaN or infinite, which ends it.
  void gradients_complete(const std::vector<sharding::Segment*>& segments,
                          const std::function<MeanLoss()>& mean_loss);
  /// The rest of the step: looks for overflow, clips, updates and publishes. False where it was skipped.
  /// Fills in what `report` says of it, but times. `late`: the rest of the update is done unit by unit
  /// (update_units()), where may_end_late(); weights are whole again after complete(). Collective.
  bool finish(const MeanLoss& mean_loss, std::int64_t step, StepReport& report, bool late = false);

  // ---- what finish() has left for later ----
  // An error here is one of the step that finish() was called for: it says so, and poisons the weights.
  /// Whether an update has transfers to hide behind the next step, and `device` can go on with it then.
  static bool may_end_late(const config::Config& config, const device::Device& device);
  /// On return these units have their new parameters, and may be gathered. Collective.
  void update_units(std::span<sharding::Unit* const> units);
  /// Goes on with transfers, and updates, that nobody has to wait for.
  void poll();
  /// Ends the update. Collective; nothing where none was left.
  void complete();
  /// Whether one was left and has not ended.
  bool pending() const { return late_step_.has_value(); }

  std::int64_t updated_chunks() const { return pipeline_.updated(); }
  /// Runs a part of step number `step`; an update that an exception ends with it is aborted: one that changed
  /// nothing is forgotten, else the weights are poisoned, and the error says so.
  void guard(std::int64_t step, const std::function<void()>& body);
  void abort(std::int64_t step);

  // ---- whether the weights are those that whole steps made ----
  /// Throws Error{usage} where they are of no use, naming the call that needs them.
  void require_usable_weights(const char* call) const;
  /// complete(); throws as well where an update beside backward has changed part of them.
  void require_whole_weights(const char* call);
  /// Throws Error{numerics}, and poisons the weights, where the last update wrote something that is not
  /// finite, which a GPU tells when it is through with it.
  void require_finite(std::int64_t steps);
  /// The weights are of no use from here on, for this reason, until restored() says that they are.
  void poison(std::string reason) { poisoned_ = std::move(reason); }
  void restored() { poisoned_.clear(); }

 private:
  /// Weights of the coming step may change.
  bool decided() const { return !pending() && pipeline_.decided(); }
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1.0; }
  optim::AverageScale average_scale() const;
  double rest_of(const MeanLoss& mean) const;
  bool skip_without_targets(StepReport& report);
  bool may_have_changed() const;
  [[noreturn]] void fail_poisoned(const Error& error) const;
  void guard_late(const std::function<void()>& body);

  const config::Config& config_;
  sharding::ShardedModel& model_;
  Optimizer& optimizer_;
  std::optional<optim::LossScaler> scaler_;  ///< fp16 only
  device::Device& device_;
  comm::Communicator& data_ranks_;   ///< over which gradients are averaged
  comm::Communicator& model_ranks_;  ///< all that take part in the step
  UpdatePipeline pipeline_;
  bool taken_up_ = false;  ///< gradients of the update under way may be complete, on some rank
  std::optional<std::int64_t> late_step_;  ///< number of the step whose update goes on after it
  std::string poisoned_;                   ///< empty: the weights are whole
};

}  // namespace sherd::engine
