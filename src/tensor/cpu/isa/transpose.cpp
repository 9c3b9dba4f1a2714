// For oneDNN's products on AMX.
#if defined(SHERD_ISA_avx512)
#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

namespace sherd::tensor::cpu::avx512 {
namespace {

struct Halves {
  using Element = std::uint16_t;
  static constexpr int per_unit = 2;
};

/// The next block's place in this line and the one below.
SHERD_INLINE void prefetch(const std::uint16_t* line, Count stride) {
  __builtin_prefetch(line);
  __builtin_prefetch(line + stride);
}

}  // namespace

void transpose_pairs(const void* from, Count stride, Count rows, Count cols, void* to, Count to_stride) {
  const auto* elements = static_cast<const std::uint16_t*>(from);
  const Count lines = (rows + 1) / 2;
  transpose_lines(
      lines, rows / 2, cols,
      [=]<bool whole>(Count u, Count c, Count left, Whole<whole> is_whole) {
        // The rows may lie on pages of their own, where the processor does not read ahead.
        if constexpr (whole) prefetch(elements + (2 * u + 2 * lanes) * stride + c, stride);
        return column_units<Halves>(elements, stride, rows, u, c, left, is_whole);
      },
      static_cast<std::uint32_t*>(to), to_stride, lines);
}

}  // namespace sherd::tensor::cpu::avx512
#endif
