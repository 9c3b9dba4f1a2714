#pragma once

#include <memory>

#include "autograd/tape.h"

namespace sherd::autograd {

/// Rotary positions (Su et al. 2021) on the query and key heads of packed qkv; layout in tensor::Attention.
Var rotary(const Var& qkv, const tensor::Attention& geometry, const tensor::Rotary& angles = {});

/// Self-attention over packed projections; layout and options in tensor::Attention, whose key names the
/// dropout mask. Nothing is dropped out unless the tape is training. qkv: [batch, seq, (heads +
/// 2·kv_heads)·head_dim]; the result: [batch, seq, heads·head_dim]. Keeps qkv, the result and one number per
/// head and row; selective recompute makes the result again. With Tape::key_cache the rows continue texts,
/// and see the keys that these have there; it knows no documents.
Var attention(const Var& qkv, tensor::Attention geometry);

}  // namespace sherd::autograd
