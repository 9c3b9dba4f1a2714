#include "engine/step/step_loss.h"

#include <algorithm>

#include "device/stream.h"

namespace sherd::engine {

using tensor::Tensor;

namespace {
/// How many targets a language model's batch has, where it says so.
std::optional<double> targets_of(const config::Config& config, device::Device& device,
                                 const tensor::Batch& batch) {
  const auto targets = batch.find("target_tokens");
  if (targets == batch.end() || !config.model || device.kind() == device::Kind::meta) return {};
  return *targets->second.data<std::int32_t>();
}
}  // namespace

double loss_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch) {
  const std::optional<double> targets = targets_of(config, device, batch);
  if (!targets || config.training.loss_average == config::LossAverage::micro_batches) return 1;
  const auto rows = static_cast<double>(config.batch.micro_batch_size);
  if (config.learns_preferences()) return *targets / rows;
  return *targets / (rows * static_cast<double>(config.model->seq_length));
}

double evaluation_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch,
                         std::int64_t samples) {
  const std::optional<double> targets = targets_of(config, device, batch);
  if (samples == 0 || targets == 0.0) return 0;
  if (targets && config.training.loss_average != config::LossAverage::micro_batches)
    return loss_weight(config, device, batch);
  return static_cast<double>(samples) / static_cast<double>(config.batch.micro_batch_size);
}

Tensor StepLoss::room(std::int64_t losses, DType dtype) const {
  return Tensor::empty(device_, {losses}, dtype, device::Category::workspace);
}

void StepLoss::add(const Tensor& loss, double weight) {
  require(!shared_.losses.defined(), "a loss was added after the others had been shared");
  if (!has_losses()) {
    ++count_;
    return;
  }
  require(loss.defined() && loss.numel() == 1, "a loss is one number, not a tensor of shape ",
          loss.shape().str());
  require(stages_.size() == 1 || loss.dtype() == DType::f32,
          "with a pipeline the model's last part gives its loss in fp32, not ", name_of(loss.dtype()));
  require(count_ == 0 || loss.dtype() == mine_.dtype(), "the losses of one step are of one dtype, not ",
          name_of(loss.dtype()), " after ", count_ == 0 ? "" : name_of(mine_.dtype()));
  if (count_ == 0 || count_ == mine_.numel()) {
    const Tensor more = room(std::max<std::int64_t>(8, 2 * count_), loss.dtype());
    if (count_ > 0) device_.copy(more.raw(), mine_.raw(), mine_.bytes());
    mine_ = more;
  }
  device_.copy(mine_.range(count_, count_ + 1).raw(), loss.raw(), loss.bytes());
  weights_.push_back(weight);
  ++count_;
}

/// This rank's and those of the ranks with other data.
StepLoss::GatheredLosses StepLoss::gather() {
  const GatheredLosses own{mine_.range(0, count_), Tensor::of<double>(device_, {count_}, weights_)};
  if (ranks_.size() == 1) return own;
  const GatheredLosses all{room(count_ * ranks_.size(), own.losses.dtype()),
                           room(count_ * ranks_.size(), DType::f64)};
  ranks_.all_gather({{own.losses, all.losses}, {own.weights, all.weights}}, {.label = label_, .scalar = true})
      .wait();
  return all;
}

void StepLoss::share() {
  if (shared_.losses.defined() || count_ == 0) return;
  const std::int64_t losses = count_ * ranks_.size();
  const GatheredLosses all =
      has_losses() ? gather() : GatheredLosses{room(losses, DType::f32), room(losses, DType::f64)};
  if (stages_.size() > 1) {
    const comm::CallOptions options{.label = label_, .scalar = true, .async = true};
    told_ = stages_.broadcast(all.losses, stages_.size() - 1, options);
    weights_told_ = stages_.broadcast(all.weights, stages_.size() - 1, options);
  }
  shared_ = all;  // last: where this throws, nothing was shared
  if (stages_.size() == 1) bring_here();
}

/// Where the processor reads them, once the device's work up to here is done.
void StepLoss::bring_here() {
  told_.wait();
  weights_told_.wait();
  here_ = true;
  if (!device_.accelerator()) return;
  for (Tensor* each : {&shared_.losses, &shared_.weights}) {
    const Tensor here = Tensor::on_host(device_, each->shape(), each->dtype());
    device_.copy(here.raw(), each->raw(), each->bytes());
    *each = here;
  }
  complete_ = device_.record();
}

MeanLoss StepLoss::mean() {
  if (mean_) return *mean_;
  share();
  if (!here_) bring_here();
  if (device_.kind() == device::Kind::meta)  // of ranks that are not there, perhaps millions
    return {0, static_cast<double>(count_ * ranks_.size()), count_ * ranks_.size()};
  complete_.wait(device_.deadline(), "the forward pass");
  device_.check();
  mean_ = add_up();
  return *mean_;
}

MeanLoss StepLoss::add_up() const {
  double sum = 0, weight = 0;
  for (std::int64_t i = 0; i < count_; ++i)
    for (std::int64_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::int64_t at = rank * count_ + i;
      const double weighs = tensor::scalar_value(shared_.weights.range(at, at + 1));
      // A micro-batch that does not count may have any loss, also none that is a number.
      if (weighs > 0) sum += weighs * tensor::scalar_value(shared_.losses.range(at, at + 1));
      weight += weighs;
    }
  return {weight > 0 ? sum / weight : 0, weight, count_ * ranks_.size()};
}

void StepLoss::clear() {
  if (!here_)
    for (comm::Work* each : {&told_, &weights_told_}) {
      try {
        each->wait();  // its memory is about to go
      } catch (const Error&) {
        // Whatever ended the step tells of it.
      }
    }
  mine_ = {};
  shared_ = {};
  complete_ = {};
  told_ = weights_told_ = {};
  weights_.clear();
  here_ = false;
  count_ = 0;
  mean_.reset();
}

}  // namespace sherd::engine
