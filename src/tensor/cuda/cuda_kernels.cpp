#include "tensor/cuda/cuda_kernels.h"

#include <algorithm>

namespace sherd::tensor::SHERD_CUDA {

CudaKernels::CudaKernels(const Target& target) : target_(target), errors_(target.device) {}

Tensor CudaKernels::scratch(std::int64_t elements, DType dtype, device::Tier tier) {
  return Tensor::empty(target_.device, {elements}, dtype, Category::workspace, tier);
}

void CudaKernels::require_fp8_scaling(std::string_view what, Fp8Scaling scaling) const {
  // cuBLASLt's table of scaling modes: one scale a tensor from 8.9 on, the others on Hopper alone.
  const bool one_scale = scaling == Fp8Scaling::tensor;
  const int has = target_.capability;
  if (one_scale ? has >= 89 : has == 90) return;
  fail(ErrorKind::config, what, " needs a GPU of compute capability ", one_scale ? "8.9 or above" : "9.0",
       "; this one's is ", has / 10, ".", has % 10, ". ",
       has >= 89 ? "Set \"fp8.recipe\" to \"current\", which it has" : "Train without \"fp8\" here");
}

void CudaKernels::require_fp8(const Fp8Recipe& recipe) const {
  for (const Fp8Rule& rule : {recipe.input, recipe.weight, recipe.gradient})
    require_fp8_scaling(cat("\"fp8.recipe\": \"", recipe.name, "\""), rule.scaling);
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
