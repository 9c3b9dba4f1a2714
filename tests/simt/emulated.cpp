#include "simt/emulated.h"

#include "tensor/cuda/cuda_kernels.h"

namespace sherd::test {

std::unique_ptr<tensor::Kernels> make_emulated_kernels(device::Device& device) {
  // Few processors, so that loops that stride over the grid go round more than once.
  return std::make_unique<tensor::SHERD_CUDA::CudaKernels>(device::SHERD_CUDA::Target{device, nullptr, 1});
}

}  // namespace sherd::test
