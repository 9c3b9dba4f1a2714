#include "engine/step_loss.h"

#include <algorithm>

#include "device/cuda.h"

namespace sherd::engine {

using tensor::Tensor;

Tensor StepLoss::room(std::int64_t losses, DType dtype) const {
  return Tensor::empty(device_, {losses}, dtype, device::Category::workspace);
}

void StepLoss::add(const Tensor& loss) {
  require(!shared_.defined(), "a loss was added after the others had been shared");
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
  ++count_;
}

/// This rank's and those of the ranks with other data.
Tensor StepLoss::gather() {
  const Tensor own = mine_.range(0, count_);
  if (ranks_.size() == 1) return own;
  const Tensor all = room(count_ * ranks_.size(), own.dtype());
  comm::CallOptions options;
  options.label = label_;
  options.scalar = true;
  ranks_.all_gather({{own, all}}, options).wait();
  return all;
}

void StepLoss::share() {
  if (shared_.defined() || count_ == 0) return;
  const Tensor all = has_losses() ? gather() : room(count_ * ranks_.size(), DType::f32);
  if (stages_.size() > 1) {
    comm::CallOptions options;
    options.label = label_;
    options.scalar = options.async = true;
    told_ = stages_.broadcast(all, stages_.size() - 1, options);
  }
  shared_ = all;  // last: where this throws, nothing was shared
  if (stages_.size() == 1) bring_here();
}

/// Where the processor reads them, once the device's work up to here is done.
void StepLoss::bring_here() {
  told_.wait();
  here_ = true;
  if (device_.kind() != device::Kind::cuda) return;
  const Tensor here = Tensor::empty(device_, shared_.shape(), shared_.dtype(), device::Category::workspace,
                                    device_.processor_tier());
  device_.copy(here.raw(), shared_.raw(), shared_.bytes());
  complete_ = device::as_cuda(device_).compute_stream().record();
  shared_ = here;
}

double StepLoss::mean() {
  if (mean_) return *mean_;
  share();
  if (!here_) bring_here();
  if (device_.kind() == device::Kind::meta) return 0;  // of ranks that are not there, perhaps millions
  if (device_.kind() == device::Kind::cuda) {
    complete_.wait(device::as_cuda(device_).deadline(), "the forward pass");
    device::as_cuda(device_).check();
  }
  double sum = 0;
  for (std::int64_t i = 0; i < count_; ++i)
    for (std::int64_t rank = 0; rank < ranks_.size(); ++rank)
      sum += tensor::scalar_value(shared_.range(rank * count_ + i, rank * count_ + i + 1));
  mean_ = sum / static_cast<double>(count_ * ranks_.size());
  return *mean_;
}

void StepLoss::clear() {
  try {
    if (!here_) told_.wait();  // its memory is about to go
  } catch (const Error&) {
    // What ended the step tells of it.
  }
  mine_ = shared_ = {};
  complete_ = {};
  told_ = {};
  here_ = false;
  count_ = 0;
  mean_.reset();
}

}  // namespace sherd::engine
