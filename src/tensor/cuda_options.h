#pragma once

#include "tensor/kernels.h"

namespace sherd::tensor {

/// What the kernels of a CUDA device may trade for speed; the defaults keep every result repeatable and as
/// accurate as elsewhere.
struct CudaOptions {
  bool tf32 = false;        ///< fp32 products may round their operands to TF32 (10 bits)
  bool fused_gelu = false;  ///< GELU (tanh) on the unrounded sum inside the product; see cuda/matmul.cpp
  bool deterministic_attention = true;  ///< cuDNN's backward pass without atomics
};

/// make_kernels(device) with these choices where the device is a GPU, or stands for one; others do not look
/// at them.
std::unique_ptr<Kernels> make_kernels(Device& device, const CudaOptions& options);

}  // namespace sherd::tensor
