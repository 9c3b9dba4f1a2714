#include "tensor/cpu/cpu_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_kernels(Device& device) {
  require(device.kind() == device::Kind::cpu,
          "make_kernels: this build has kernels for CPU devices only; use make_cpu_device()");
  return std::make_unique<cpu::CpuKernels>(device);
}

}  // namespace sherd::tensor
