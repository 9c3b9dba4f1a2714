#pragma once

#include "tensor/kernels.h"

namespace sherd::tensor {

/// The kernels of a CUDA device. Throws Error{usage} in a build without CUDA (cuda/absent).
std::unique_ptr<Kernels> make_cuda_kernels(Device& device);

}  // namespace sherd::tensor
