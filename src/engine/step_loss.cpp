#include "engine/step_loss.h"

#include <algorithm>

#include "device/cuda.h"

namespace sherd::engine {

using tensor::Tensor;

Tensor StepLoss::room(std::int64_t losses, DType dtype) const {
  return Tensor::empty(device_, {losses}, dtype, device::Category::workspace);
}

void StepLoss::add(const Tensor& loss) {
  require(loss.numel() == 1, "a loss is one number, not a tensor of shape ", loss.shape().str());
  require(!shared_.defined(), "a loss was added after the others had been shared");
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

void StepLoss::share() {
  if (shared_.defined() || count_ == 0) return;
  Tensor all = mine_.range(0, count_);
  if (ranks_.size() > 1) {
    const Tensor full = room(count_ * ranks_.size(), mine_.dtype());
    comm::CallOptions options;
    options.label = label_;
    options.scalar = true;
    ranks_.all_gather({{all, full}}, options).wait();
    all = full;
  }
  if (device_.kind() == device::Kind::cuda) {
    const Tensor here = Tensor::empty(device_, all.shape(), all.dtype(), device::Category::workspace,
                                      device_.processor_tier());
    device_.copy(here.raw(), all.raw(), all.bytes());
    complete_ = device::as_cuda(device_).compute_stream().record();
    all = here;
  }
  shared_ = all;  // last: where this throws, nothing was shared
}

double StepLoss::mean() {
  if (mean_) return *mean_;
  share();
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
  mine_ = shared_ = {};
  complete_ = {};
  count_ = 0;
  mean_.reset();
}

}  // namespace sherd::engine
