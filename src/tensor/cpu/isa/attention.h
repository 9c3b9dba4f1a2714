#pragma once

#include <cstdint>

#include "tensor/seen_keys.h"

// Attention of one head, compiled once per instruction set. Plain declarations only; see tables.h.

namespace sherd::tensor::cpu {

/// One head's rows in the compute type of the loops, its "elements": fp32, or bf16 with an even `dim`. Rows
/// of q, k and v are `stride` elements apart, those of out and dout `out_stride`. `out` and `dout` are for
/// the way back.
struct AttentionHead {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr, *dout = nullptr;
  std::int64_t stride = 0, out_stride = 0;
  std::int64_t seq = 0, dim = 0;
  float scale = 1;  ///< positive
  float cap = 0;    ///< of scaled scores; 0: none
  SeenKeys seen{};
  /// Dropout: score (i, j) is kept when the upper 24 bits of word first + i·score_row + j of the Philox
  /// stream are at least `threshold`, and then multiplied by `factor`. Threshold 0: none.
  std::uint32_t threshold = 0;
  float factor = 1;
  std::uint64_t seed = 0, stream = 0, first = 0;
  std::int64_t score_row = 0;
};

struct AttentionOps {
  std::int64_t (*forward_scratch)(const AttentionHead& head);   ///< bytes
  std::int64_t (*backward_scratch)(const AttentionHead& head);  ///< bytes
  /// Writes out, elements [seq, dim] at head.out_stride, and lse[seq]: zeros and -inf of queries that see no
  /// key.
  void (*forward)(const AttentionHead& head, void* out, float* lse, void* scratch);
  /// Writes dq, elements [seq, dim], and adds to dk and dv: fp32 [seq, dim] with rows attention_row(dim)
  /// apart, whose memory reaches to the end of the last row, dk less a factor of head.scale.
  void (*backward)(const AttentionHead& head, const float* lse, void* dq, std::int64_t dq_stride, float* dk,
                   float* dv, void* scratch);
  /// Rounds factor·from, fp32 as above, to elements.
  void (*store_rows)(const float* from, std::int64_t rows, std::int64_t dim, float factor, void* to,
                     std::int64_t to_stride);
};

constexpr std::int64_t attention_row(std::int64_t dim) {
  return (dim + 31) / 32 * 32;
}

namespace portable {
extern const AttentionOps attention_f32;
}
namespace avx2 {
extern const AttentionOps attention_f32;
}
namespace avx512 {
extern const AttentionOps attention_f32;
extern const AttentionOps attention_bf16;  ///< needs AVX512-BF16
extern const AttentionOps attention_amx;   ///< needs AMX too
}  // namespace avx512

}  // namespace sherd::tensor::cpu
