#include "engine/update/step_update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/text/excerpt.h"
#include "engine/setup/resources.h"

namespace sherd::engine {

namespace {
UpdatePipelineOptions pipeline_options(const config::Config& config, const Optimizer& optimizer) {
  const config::Offload& offload = config.zero.offload_optimizer;
  return {config.zero.sub_group_size, static_cast<int>(offload.buffer_count), offload.pipeline_read,
          offload.pipeline_write, optimizer.rules()};
}
}  // namespace

StepUpdate::StepUpdate(const config::Config& config, sharding::ShardedModel& model, Optimizer& optimizer,
                       const Resources& resources)
    : config_(config),
      model_(model),
      optimizer_(optimizer),
      device_(resources.device()),
      data_ranks_(resources.groups().group(comm::Axis::data)),
      model_ranks_(resources.groups().world()),
      pipeline_(model, model.sources(), pipeline_options(config, optimizer)) {
  if (config.precision.compute == DType::f16) scaler_.emplace(config.precision.fp16);
  model_.set_finish_changes([this] { complete(); });
  optimizer_.prepare(model_, device_);
  model_.gradients().set_keeps_own([this](const sharding::Segment& segment) {
    return optimizer_.exchanges_momentum(segment, optimizer_.steps() + 1);
  });
}

StepUpdate::~StepUpdate() {
  model_.set_finish_changes(nullptr);
  model_.gradients().set_keeps_own(nullptr);
  optimizer_.release();
}

namespace {
/// Whether some rule needs all gradients, or other ranks, before it updates anything.
bool waits(const config::Optimizer& optimizer) {
  const auto of_rule = [](const config::OptimizerRule& rule) {
    const optim::Description what = optim::describe(rule);
    return optim::measures(what) || optim::takes_matrices(what) || rule.exchanges_momentum();
  };
  return of_rule(optimizer) || std::any_of(optimizer.groups.begin(), optimizer.groups.end(), of_rule);
}
}  // namespace

bool StepUpdate::may_begin_early(const config::Config& config) {
  return config.gradient_clipping <= 0 && config.precision.compute == DType::bf16 &&
         !config.precision.check_grad_overflow && !waits(config.optimizer) &&
         config.zero.offload_optimizer.device != config::OffloadDevice::none;
}

optim::AverageScale StepUpdate::average_scale() const {
  return optim::AverageScale::over(config_.batch.gradient_accumulation_steps * data_ranks_.size());
}

/// The divisor of a step with fewer micro-batches than it should have, or more, stays that of a whole one, as
/// DeepSpeed has it.
double StepUpdate::rest_of(const MeanLoss& mean) const {
  const auto whole = static_cast<double>(config_.batch.gradient_accumulation_steps * data_ranks_.size());
  return average_scale().rest(mean.weight * whole / static_cast<double>(mean.micro_batches));
}

void StepUpdate::begin() {
  complete();
  taken_up_ = false;
  if (!may_begin_early(config_)) return pipeline_.begin(optimizer_, std::nullopt);
  optimizer_.begin_step();
  // The weights of micro-batches are known with the loss, before any gradient is taken up.
  pipeline_.begin(optimizer_, 1.0);
}

void StepUpdate::gradients_complete(const std::vector<sharding::Segment*>& segments,
                                    const std::function<MeanLoss()>& mean_loss) {
  taken_up_ = true;
  for (const sharding::Segment* segment : segments) {
    if (!decided()) return;
    model_.require_no_leases(*segment);
    const MeanLoss mean = mean_loss();
    if (!std::isfinite(mean.value) || mean.weight == 0) {  // finish() will say so
      pipeline_.abandon();
      optimizer_.abandon_step();
      return;
    }
    pipeline_.decide(rest_of(mean));
    pipeline_.gradients_complete(*segment);
  }
}

/// No gradient came, and the mean of no losses is none.
bool StepUpdate::skip_without_targets(StepReport& report) {
  if (decided()) optimizer_.abandon_step();
  pipeline_.abandon();
  report.lr = optimizer_.lr();
  report.loss = std::numeric_limits<double>::quiet_NaN();
  report.grad_norm = 0;
  report.loss_scale = loss_scale();
  return false;
}

bool StepUpdate::finish(const MeanLoss& mean, std::int64_t step, StepReport& report, bool late) {
  report.has_targets = mean.weight > 0;
  if (!report.has_targets) return skip_without_targets(report);
  const double mean_loss = mean.value, rest = rest_of(mean);
  if (decided()) pipeline_.decide(rest);
  report.lr = decided() ? optimizer_.used_lr() : optimizer_.lr();
  report.loss = mean_loss;
  report.loss_scale = loss_scale();
  if (!std::isfinite(mean_loss) && !scaler_)
    fail(ErrorKind::numerics, "the loss is ", mean_loss, " at step ", step,
         ": nothing was updated; lower the learning rate, clip gradients (gradient_clipping), or resume from "
         "the last checkpoint");
  if (decided() && device_.accelerator())
    pipeline_.update_rest();  // before the norm, for which the thread waits until the GPU is through with
                              // backward
  const tensor::ExactSum squares = model_.gradients().sum_of_squares();
  const bool overflow = squares.non_finite > 0 || !std::isfinite(mean_loss);
  const config::Precision& precision = config_.precision;
  report.grad_norm = std::sqrt(squares.value()) * rest / report.loss_scale;
  if (scaler_) scaler_->update(overflow);
  if (overflow && !scaler_ && !(precision.compute == DType::bf16 && precision.check_grad_overflow))
    fail(ErrorKind::numerics, "a gradient is NaN or infinite at step ", step, " although the loss is finite",
         may_have_changed() ? "" : ": nothing was updated", "; lower the learning rate or clip gradients");
  if (overflow) {
    pipeline_.abandon();
    return false;
  }
  if (!decided()) {
    if (!pipeline_.under_way()) pipeline_.begin(optimizer_, std::nullopt);
    const double clipping = config_.gradient_clipping;
    optimizer_.begin_step(report.grad_norm * optim::clip_factor(report.grad_norm, clipping));
    taken_up_ = true;
    pipeline_.decide(rest * optim::gradient_factor(report.grad_norm, report.loss_scale, clipping));
  }
  if (!late) return pipeline_.finish(), true;
  late_step_ = step;
  guard_late([&] { pipeline_.leave(); });
  return true;
}

// Beside a GPU the processor updates what the GPU hands it in an order of its own (UpdateStaging).
bool StepUpdate::may_end_late(const config::Config& config, const device::Device& device) {
  const auto on_nvme = [](const config::Offload& o) { return o.device == config::OffloadDevice::nvme; };
  return !device.has_own_memory() &&
         (on_nvme(config.zero.offload_param) || on_nvme(config.zero.offload_optimizer));
}

void StepUpdate::update_units(std::span<sharding::Unit* const> units) {
  if (pending()) guard_late([&] { pipeline_.update_units(units); });
}

void StepUpdate::poll() {
  if (!pending()) return pipeline_.poll();
  guard_late([&] { pipeline_.poll(); });
  if (!pipeline_.under_way()) late_step_.reset();
}

void StepUpdate::complete() {
  if (!pending()) return;
  guard_late([&] { pipeline_.complete(); });
  late_step_.reset();
}

void StepUpdate::guard_late(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    abort(*late_step_);
    fail_poisoned(error);
  } catch (...) {
    abort(*late_step_);
    throw;
  }
}

/// Whether an update under way may have changed weights. What other ranks have done since gradients may be
/// complete is not known here, and one weight is enough. A step whose update is late counts as taken.
bool StepUpdate::may_have_changed() const {
  return pending() || (decided() && (pipeline_.changed() || (model_ranks_.size() > 1 && taken_up_)));
}

void StepUpdate::abort(std::int64_t step) {
  if (!pipeline_.under_way()) return;
  if (may_have_changed())
    poison(cat("step ", late_step_.value_or(step), " has changed part of the weights and cannot be undone"));
  else if (decided())
    optimizer_.abandon_step();
  pipeline_.abandon();
  late_step_.reset();
}

void StepUpdate::fail_poisoned(const Error& error) const {
  throw Error(error.kind(), cat(error.what(), "; ", poisoned_, ": load a checkpoint to go on"));
}

void StepUpdate::guard(std::int64_t step, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (pending() || !poisoned_.empty()) throw;  // of what is late, which has said so, or of no update
    abort(step);
    if (poisoned_.empty()) throw;
    fail_poisoned(error);
  } catch (...) {
    if (!pending()) abort(step);
    throw;
  }
}

void StepUpdate::require_usable_weights(const char* call) const {
  require(poisoned_.empty(), call, ": ", poisoned_, ": go on with load_checkpoint()");
}

void StepUpdate::require_whole_weights(const char* call) {
  require_usable_weights(call);
  complete();
  require(
      !pipeline_.under_way(), call,
      " between backward() and step(): with gradient_clipping and bf16.check_grad_overflow off the update "
      "begins in backward(); call step() first");
}

void StepUpdate::require_finite(std::int64_t steps) {
  if (optimizer_.finite()) return;
  pipeline_.abandon();
  poison(cat("step ", steps, " has made a weight NaN or infinite"));
  fail(ErrorKind::numerics, poisoned_, ": lower the learning rate and load the last checkpoint");
}

}  // namespace sherd::engine
