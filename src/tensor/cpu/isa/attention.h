#pragma once

#include <cstdint>

// Attention of one head, compiled once per instruction set. Plain declarations only; see tables.h.

namespace sherd::tensor::cpu {

/// One head's rows in the compute type of the loops: fp32, or bf16. Rows of q, k, v and dout are `stride` and `dout_stride`
/// elements apart, and `dim` elements wide (even for bf16).
struct AttentionHead {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;
  std::int64_t stride = 0, dout_stride = 0;
  std::int64_t seq = 0, dim = 0;
  float scale = 1;
  bool causal = true;
  /// Dropout: score (i, j) is kept when the upper 24 bits of word first + i·seq + j of the Philox stream are at least
  /// `threshold`, and then multiplied by `factor`. Threshold 0: none.
  std::uint32_t threshold = 0;
  float factor = 1;
  std::uint64_t seed = 0, stream = 0, first = 0;
};

struct AttentionOps {
  std::int64_t (*forward_scratch)(const AttentionHead& head);   ///< bytes
  std::int64_t (*backward_scratch)(const AttentionHead& head);  ///< bytes
  /// out: fp32 [seq, dim], its rows attention_row(dim) apart; lse: [seq].
  void (*forward)(const AttentionHead& head, float* out, float* lse, void* scratch);
  /// delta[seq] = Σ dout·out per row. dq, dk, dv: fp32 [seq, dim], their rows attention_row(dim) apart and their memory up to
  /// the end of the last row. dk and dv are added to.
  void (*backward)(const AttentionHead& head, const float* lse, const float* delta, float* dq, float* dk, float* dv,
                   void* scratch);
  float (*dot)(const float* a, const float* b, std::int64_t n);
};

constexpr std::int64_t attention_row(std::int64_t dim) { return (dim + 31) / 32 * 32; }

namespace portable {
extern const AttentionOps attention_f32;
}
namespace avx2 {
extern const AttentionOps attention_f32;
}
namespace avx512 {
extern const AttentionOps attention_f32;
extern const AttentionOps attention_bf16;  ///< needs AVX512-BF16
}  // namespace avx512

}  // namespace sherd::tensor::cpu
