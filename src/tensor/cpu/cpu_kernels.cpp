#include "tensor/cpu/cpu_kernels.h"

#include "tensor/cuda/make.h"
#include "tensor/meta/meta_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_kernels(Device& device) {
  if (device.kind() == device::Kind::meta) return std::make_unique<meta::MetaKernels>(device);
  if (device.kind() == device::Kind::cuda) return make_cuda_kernels(device);
  return std::make_unique<cpu::CpuKernels>(device);
}

}  // namespace sherd::tensor
