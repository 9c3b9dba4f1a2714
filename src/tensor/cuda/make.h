#pragma once

#include "tensor/kernels.h"

namespace sherd::tensor {

/// The kernels of a CUDA device. Throws Error{usage} in a build without CUDA (cuda/stub).
std::unique_ptr<Kernels> make_cuda_kernels(Device& device, const CudaOptions& options);

}  // namespace sherd::tensor
