#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/step_report.h"
#include "engine/update_pipeline.h"
#include "optim/clipping.h"

namespace sherd::engine {

/// Decides about the update of a step and runs it, from the first gradients that allow it to published
/// weights; knows what is left of the weights where one fails. One per rank, used from its thread.
class StepUpdate {
 public:
  /// What it works with, all of which must outlive it. `scaler`: null without loss scaling.
  struct Parts {
    const config::Config& config;
    sharding::ShardedModel& model;
    Optimizer& optimizer;
    optim::LossScaler* scaler;
    comm::Communicator& data_ranks;   ///< over which gradients are averaged
    comm::Communicator& model_ranks;  ///< all that take part in the step
    device::Device& device;
  };
  StepUpdate(const Parts& parts, const sharding::StateSources& sources);

  /// Whether an update needs nothing that is known only after backward, and has transfers to hide behind it.
  static bool may_begin_early(const config::Config& config);
  /// What the loss is multiplied with before backward.
  double seed() const { return (parts_.scaler ? parts_.scaler->scale() : 1.0) * average_scale().seed; }

  /// Opens the update beside backward, with the rates of this moment.
  void begin_early();
  /// These segments' gradients will not change any more; begins to update them where an update is open,
  /// unless `mean_loss()` is NaN or infinite, which ends it.
  void gradients_complete(const std::vector<sharding::Segment*>& segments,
                          const std::function<double()>& mean_loss);
  /// The rest of the step: looks for overflow, clips, updates and publishes. False where it was skipped.
  /// Fills in what `report` says of it, but times. Collective.
  bool finish(double mean_loss, std::int64_t step, StepReport& report);

  bool under_way() const { return pipeline_.under_way(); }
  std::int64_t updated_chunks() const { return pipeline_.updated(); }
  /// Runs a part of step number `step`; an update that an exception ends with it is aborted: one that changed
  /// nothing is forgotten, else the weights are poisoned, and the error says so.
  void guard(std::int64_t step, const std::function<void()>& body);
  void abort(std::int64_t step);

  // ---- whether the weights are those that whole steps made ----
  /// Throws Error{usage} where they are not, or are partly updated, naming the call that needs them.
  void require_whole_weights(const char* call) const;
  /// Throws Error{numerics}, and poisons the weights, where the last update wrote something that is not
  /// finite, which a GPU tells when it is through with it.
  void require_finite(std::int64_t steps);
  /// The weights are of no use from here on, for this reason, until restored() says that they are.
  void poison(std::string reason) { poisoned_ = std::move(reason); }
  void restored() { poisoned_.clear(); }

 private:
  optim::AverageScale average_scale() const;
  bool may_have_changed() const;

  Parts parts_;
  UpdatePipeline pipeline_;
  bool taken_up_ = false;  ///< gradients of the update under way may be complete, on some rank
  std::string poisoned_;   ///< empty: the weights are whole
};

}  // namespace sherd::engine
