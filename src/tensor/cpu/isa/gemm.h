#pragma once

#include <cstdint>

// Packed products, compiled once per instruction set. Plain declarations only; see tables.h. A "unit" is 32
// bits along the inner extent: one fp32 or two bf16; strides are in units but where they say elements.

namespace sherd::tensor::cpu {

/// The use of finished sums: out = round(sums + bias), or out = round(out + sums + bias). With `folds`
/// the sums themselves are rounded to bf16 before.
struct GemmFinish {
  void* out = nullptr;          ///< bf16, or fp32 where `wide`
  std::int64_t out_stride = 0;  ///< elements
  bool wide = false, accumulate = false, folds = false;
  const float* bias = nullptr;  ///< [cols rounded up to slivers], or null
};

/// A part of the inner extent of packed operands, in units.
struct GemmPart {
  std::int64_t units = 0;  ///< units that were packed
  std::int64_t first = 0, count = 0;
  bool add = false;  ///< the sums are added to what c holds
};

struct GemmOps {
  std::int64_t sliver;       ///< columns of b that are packed together
  std::int64_t left_sliver;  ///< rows of a that pack_left() puts together
  std::int64_t per_unit;     ///< elements in a unit
  /// b's columns as rows of units, `stride` apart: [cols, units] to slivers [units, sliver], zeros in missing
  /// columns.
  void (*pack_rows)(const void* b, std::int64_t stride, std::int64_t units, std::int64_t cols, void* packed);
  /// b as [inner, cols], `stride` elements from row to row, to slivers `sliver_units` units apart.
  void (*pack_columns)(const void* b, std::int64_t stride, std::int64_t inner, std::int64_t cols,
                       void* packed, std::int64_t sliver_units);
  /// A part of a as [inner, rows], `stride` elements from row to row, to slivers of left_sliver rows, one
  /// behind the other.
  void (*pack_left)(const void* a, std::int64_t stride, std::int64_t inner, std::int64_t rows, void* packed);
  /// c[rows, cols rounded up to slivers] (+)= a[rows, count]·packed, a and c from the part's first unit; with
  /// `finish` the sums go to its out[rows, cols] instead, and c, which may be null without add, is only read.
  /// An a_stride of 0 says that a's rows are slivers that pack_left() made of the part.
  void (*multiply)(const void* a, std::int64_t a_stride, std::int64_t rows, const void* packed,
                   const GemmPart& part, std::int64_t cols, float* c, std::int64_t c_stride,
                   const GemmFinish* finish);
};

namespace portable {
extern const GemmOps gemm_f32;
}
namespace avx2 {
extern const GemmOps gemm_f32;
}
namespace avx512 {
extern const GemmOps gemm_f32;
extern const GemmOps gemm_bf16;  ///< needs AVX512-BF16
/// to[c·to_stride + u] = elements (2u, c) and (2u+1, c) of 16 bits, `stride` elements from row to row; a
/// missing last row counts as zeros.
void transpose_pairs(const void* from, std::int64_t stride, std::int64_t rows, std::int64_t cols, void* to,
                     std::int64_t to_stride);
}  // namespace avx512

}  // namespace sherd::tensor::cpu
