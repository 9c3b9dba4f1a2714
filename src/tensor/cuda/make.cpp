#include "tensor/cuda/make.h"

#include "device/cuda/cuda_device.h"
#include "tensor/cuda/cuda_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_cuda_kernels(Device& device, const CudaOptions& options) {
  device::CudaDevice& gpu = device::as_cuda(device);
  SHERD_CUDA::load_matmul_library();  // now, as a run should not end in the midst of its first step
  auto kernels = std::make_unique<SHERD_CUDA::CudaKernels>(
      SHERD_CUDA::Target{device, &gpu.compute_stream().queue(), gpu.gpu().processors,
                         gpu.gpu().shared_per_block, gpu.ordinal(), gpu.gpu().major * 10 + gpu.gpu().minor});
  kernels->options = options;
  kernels->watch(gpu.after_synchronize([&kernels = *kernels] { kernels.check_data(); }));
  return kernels;
}

}  // namespace sherd::tensor
