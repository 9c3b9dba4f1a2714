#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// (x - mean)/√(variance + eps)·weight + bias over the last extent (Ba et al. 2016). x: [..., h]; weight,
/// bias: [h]. Row statistics are kept for backward; selective recompute makes the result again from x.
Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps = 1e-5);
/// x/√(mean(x²) + eps)·weight over the last extent (Zhang and Sennrich 2019). Kept and made again likewise.
Var rms_norm(const Var& x, const Var& weight, double eps = 1e-5);
/// rms_norm of each query head and each key head of packed qkv (tensor::Attention), with one gain for all
/// query heads and one for all key heads; values pass. qkv: [..., (heads + 2·kv_heads)·head_dim]; gains:
/// [head_dim]. Kept and made again likewise (Qwen3).
Var head_norm(const Var& qkv, const Var& query_gain, const Var& key_gain, const tensor::Attention& geometry,
              double eps = 1e-5);

}  // namespace sherd::autograd
