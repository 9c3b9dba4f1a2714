#include "tensor/cuda/cuda_kernels.h"

#include <algorithm>

namespace sherd::tensor::SHERD_CUDA {

CudaKernels::CudaKernels(const Target& target) : target_(target), errors_(target.device) {}

Tensor CudaKernels::scratch(std::int64_t elements, DType dtype, device::Tier tier) {
  return Tensor::empty(target_.device, {elements}, dtype, Category::workspace, tier);
}

DataErrors::DataErrors(device::Device& device)
    : memory_(
          device.allocate(data_error_kinds * sizeof(DataErrorSlot), Category::workspace, device::Tier::host)),
      slots_(reinterpret_cast<DataErrorSlot*>(memory_.data())) {
  std::fill_n(slots_, data_error_kinds, DataErrorSlot{none_wrong, 0});
}

void DataErrors::check() {
  for (int kind = 0; kind < data_error_kinds; ++kind) {
    const DataErrorSlot found = slots_[kind];
    if (found.first == none_wrong) continue;
    slots_[kind].first = none_wrong;
    const auto value = static_cast<std::int32_t>(found.first & 0xffffffffu);
    const std::uint64_t position = found.first >> 32;
    if (static_cast<DataError>(kind) == DataError::embedding_id)
      fail(ErrorKind::data, "embedding: id ", value, " at position ", position,
           " is outside the vocabulary of ", found.limit);
    fail(ErrorKind::data, "cross_entropy: target ", value, " at position ", position, " is outside [0, ",
         found.limit, ")");
  }
}

}  // namespace sherd::tensor::SHERD_CUDA
