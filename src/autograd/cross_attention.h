#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// Which keys queries see, and how scores are scaled.
struct AttentionMask {
  bool causal = false;  ///< query i sees keys j <= i alone, both counted from the first
  float scale = 0;      ///< multiplies q·k; 0 means 1/√head_dim
  /// [batch, k_len], uint8: 0 hides a key (padding) from all queries of its row. Undefined: none is hidden.
  Tensor seen{};
};

/// AttentionMask::seen for rows of which the first lengths[b] keys of `keys` are there and the others
/// padding. lengths: int32 [batch]; waits for the device. Throws Error{data} for a length that is none.
Tensor seen_by_length(Tape& tape, const Tensor& lengths, std::int64_t keys);

/// softmax(scale·q·kᵀ)·v over the keys that a query sees; 0 where it sees none. q: [batch, q_len, heads,
/// head_dim]; k: [batch, k_len, kv_heads, head_dim]; v: [batch, k_len, kv_heads, width]; the result: [batch,
/// q_len, heads, width], of one dtype. heads / kv_heads query heads in a row share a key head.
///
/// As many queries as keys, all of them seen, go through the kernels of packed self-attention. Else scores
/// are formed for one key head of one sequence at a time: heads/kv_heads·q_len·k_len numbers in fp32, and
/// once more in a dtype of 16 bits. Backward forms them again; q, k and v are kept.
Var attention(const Var& q, const Var& k, const Var& v, const AttentionMask& mask = {});

}  // namespace sherd::autograd
