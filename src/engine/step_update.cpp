#include "engine/step_update.h"

#include <cmath>
#include <utility>

namespace sherd::engine {

namespace {
UpdatePipelineOptions pipeline_options(const config::Config& config, const Optimizer& optimizer) {
  const config::Offload& offload = config.zero.offload_optimizer;
  return {config.zero.sub_group_size, static_cast<int>(offload.buffer_count), offload.pipeline_read,
          offload.pipeline_write, optimizer.rules()};
}
}  // namespace

StepUpdate::StepUpdate(const Parts& parts, const sharding::StateSources& sources)
    : parts_(parts), pipeline_(parts.model, sources, pipeline_options(parts.config, parts.optimizer)) {}

bool StepUpdate::may_begin_early(const config::Config& config) {
  return config.gradient_clipping <= 0 && config.precision.compute == DType::bf16 &&
         !config.precision.check_grad_overflow &&
         config.zero.offload_optimizer.device != config::OffloadDevice::none;
}

optim::AverageScale StepUpdate::average_scale() const {
  return optim::AverageScale::over(parts_.config.batch.gradient_accumulation_steps *
                                   parts_.data_ranks.size());
}

void StepUpdate::begin_early() {
  taken_up_ = false;
  parts_.optimizer.begin_step();
  pipeline_.begin(parts_.optimizer, average_scale().rest);
}

void StepUpdate::gradients_complete(const std::vector<sharding::Segment*>& segments,
                                    const std::function<double()>& mean_loss) {
  taken_up_ = true;
  for (const sharding::Segment* segment : segments) {
    if (!under_way()) return;
    parts_.model.require_no_leases(*segment);
    if (!std::isfinite(mean_loss())) {  // finish() will say so
      pipeline_.abandon();
      parts_.optimizer.abandon_step();
      return;
    }
    pipeline_.gradients_complete(*segment);
  }
}

bool StepUpdate::finish(double mean_loss, std::int64_t step, StepReport& report) {
  report.lr = under_way() ? parts_.optimizer.used_lr() : parts_.optimizer.lr();
  report.loss = mean_loss;
  report.loss_scale = parts_.scaler ? parts_.scaler->scale() : 1.0;
  if (!std::isfinite(mean_loss) && !parts_.scaler)
    fail(ErrorKind::numerics, "the loss is ", mean_loss, " at step ", step,
         ": nothing was updated; lower the learning rate, clip gradients (gradient_clipping), or resume from "
         "the last checkpoint");
  if (under_way() && parts_.device.kind() == device::Kind::cuda)
    pipeline_.update_rest();  // before the norm, for which the thread waits until the GPU is through with
                              // backward
  const tensor::ExactSum squares = parts_.model.gradients().sum_of_squares();
  const bool overflow = squares.non_finite > 0 || !std::isfinite(mean_loss);
  const config::Precision& precision = parts_.config.precision;
  const double rest = average_scale().rest;
  report.grad_norm = std::sqrt(squares.value()) * rest / report.loss_scale;
  if (parts_.scaler) parts_.scaler->update(overflow);
  if (overflow && !parts_.scaler && !(precision.compute == DType::bf16 && precision.check_grad_overflow))
    fail(ErrorKind::numerics, "a gradient is NaN or infinite at step ", step, " although the loss is finite",
         may_have_changed() ? "" : ": nothing was updated", "; lower the learning rate or clip gradients");
  if (overflow) return false;
  if (!under_way()) {
    parts_.optimizer.begin_step();
    taken_up_ = true;
    pipeline_.begin(parts_.optimizer, rest * optim::gradient_factor(report.grad_norm, report.loss_scale,
                                                                    parts_.config.gradient_clipping));
  }
  pipeline_.finish();
  return true;
}

/// Whether an update under way may have changed weights. What other ranks have done since gradients may be
/// complete is not known here, and one weight is enough.
bool StepUpdate::may_have_changed() const {
  return under_way() && (pipeline_.updated() > 0 || (parts_.model_ranks.size() > 1 && taken_up_));
}

void StepUpdate::abort(std::int64_t step) {
  if (!under_way()) return;
  if (may_have_changed())
    poison(cat("step ", step, " has changed part of the weights and cannot be undone"));
  else
    parts_.optimizer.abandon_step();
  pipeline_.abandon();
}

void StepUpdate::guard(std::int64_t step, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    abort(step);
    if (poisoned_.empty()) throw;
    throw Error(error.kind(), cat(error.what(), "; ", poisoned_, ": load a checkpoint to go on"));
  } catch (...) {
    abort(step);
    throw;
  }
}

void StepUpdate::require_whole_weights(const char* call) const {
  require(poisoned_.empty(), call, ": ", poisoned_, ": go on with load_checkpoint()");
  require(
      !under_way(), call,
      " between backward() and step(): with gradient_clipping and bf16.check_grad_overflow off the update "
      "begins in backward(); call step() first");
}

void StepUpdate::require_finite(std::int64_t steps) {
  if (parts_.optimizer.finite()) return;
  if (under_way()) pipeline_.abandon();
  poison(cat("step ", steps, " has made a weight NaN or infinite"));
  fail(ErrorKind::numerics, poisoned_, ": lower the learning rate and load the last checkpoint");
}

}  // namespace sherd::engine
