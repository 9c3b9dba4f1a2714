#include "tensor/cpu/cpu_kernels.h"
#include "tensor/meta/meta_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_kernels(Device& device) {
  if (device.kind() == device::Kind::meta) return std::make_unique<meta::MetaKernels>(device);
  require(device.kind() == device::Kind::cpu,
          "make_kernels: this build has kernels for CPU and meta devices only; use make_cpu_device()");
  return std::make_unique<cpu::CpuKernels>(device);
}

}  // namespace sherd::tensor
