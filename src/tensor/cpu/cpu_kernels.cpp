#include "tensor/cpu/cpu_kernels.h"

#include "tensor/cuda/make.h"
#include "tensor/meta/meta_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_kernels(Device& device) {
  return make_kernels(device, {});
}

std::unique_ptr<Kernels> make_kernels(Device& device, const CudaOptions& options) {
  if (device.kind() == device::Kind::meta) return std::make_unique<meta::MetaKernels>(device, options);
  if (device.kind() == device::Kind::cuda) return make_cuda_kernels(device, options);
  return std::make_unique<cpu::CpuKernels>(device);
}

}  // namespace sherd::tensor
