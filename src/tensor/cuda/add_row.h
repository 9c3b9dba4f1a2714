#pragma once

#include "device/cuda/target.h"
#include "tensor/tensor.h"

namespace sherd::tensor::SHERD_CUDA {

/// to[r] = x[r] + table[r mod p], where x and to are [.., n] of one dtype and table [p, n] of any with the
/// same compute type: positions, and a bias where p is 1. `to` may be x.
void add_row(const device::SHERD_CUDA::Target& target, const Tensor& x, const Tensor& table,
             const Tensor& to);

}  // namespace sherd::tensor::SHERD_CUDA
