#pragma once

#include "tensor/kernels.h"

// Bytes of Category::workspace that the CPU kernels hold at most during one call, with every thread of the
// device at work: what a meta device charges in their place. Each function stands beside its kernel and
// shares its plan. No tensor is read.

namespace sherd::tensor::cpu {

std::size_t matmul_workspace(Device& device, const Matmul& args);
std::size_t sum_rows_workspace(const Tensor& x, const Tensor& out);
/// layer_norm_backward and rms_norm_backward.
std::size_t norm_backward_workspace(const Tensor& x, const Tensor& dweight, const Tensor& dbias);
std::size_t attention_workspace(Device& device, const Tensor& qkv, const Attention& geometry);
std::size_t attention_backward_workspace(Device& device, const Tensor& qkv, const Attention& geometry);
std::size_t attend_stored_workspace(Device& device, const Tensor& qkv, const Attention& geometry,
                                    const KeyStore& store, const Tensor& out);

}  // namespace sherd::tensor::cpu
