#include "engine/run_ahead.h"

#include "device/cuda.h"

namespace sherd::engine {

void LossReader::add(const tensor::Tensor& loss) {
  require(loss.numel() == 1, "a loss is one number, not a tensor of shape ", loss.shape().str());
  if (device_.kind() != device::Kind::cuda) {
    values_.push_back(tensor::scalar_value(loss));
    return;
  }
  pending_.push_back(tensor::Tensor::empty(device_, loss.shape(), loss.dtype(), device::Category::workspace,
                                           device_.processor_tier()));
  device_.copy(pending_.back().raw(), loss.raw(), loss.bytes());
  arrived_ = device::as_cuda(device_).compute_stream().record();
}

const std::vector<double>& LossReader::values() {
  if (pending_.empty()) return values_;
  device::CudaDevice& gpu = device::as_cuda(device_);
  arrived_.wait(gpu.deadline(), "the forward pass");
  gpu.check();
  for (const tensor::Tensor& loss : pending_) values_.push_back(tensor::scalar_value(loss));
  pending_.clear();
  return values_;
}

void LossReader::clear() {
  pending_.clear();
  arrived_ = {};
  values_.clear();
}

void RunAhead::begin() {
  if (device_.kind() != device::Kind::cuda) return;
  for (; under_way_.size() >= most; under_way_.pop_front())
    under_way_.front().wait(device::as_cuda(device_).deadline(), "an earlier micro-batch");
}

void RunAhead::end() {
  if (device_.kind() == device::Kind::cuda)
    under_way_.push_back(device::as_cuda(device_).compute_stream().record());
}

}  // namespace sherd::engine
