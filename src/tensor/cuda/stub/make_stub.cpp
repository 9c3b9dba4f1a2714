#include "tensor/cuda/make.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_cuda_kernels(Device&, const CudaOptions&) {
  fail(ErrorKind::usage,
       "make_kernels: this build has no kernels for CUDA; configure it with -DSHERD_WITH_CUDA=ON where "
       "nvcc is found, or use device type cpu");
}

}  // namespace sherd::tensor
