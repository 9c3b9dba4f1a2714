#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

void units(const void* from, Count stride, Count rows, Count cols, void* to, Count to_stride) {
  transpose_units(static_cast<const std::uint32_t*>(from), stride, rows, cols,
                  static_cast<std::uint32_t*>(to), to_stride, rows);
}

struct Halves {
  using Element = std::uint16_t;
  static constexpr int per_unit = 2;
};

/// The next block's place in this line and the one below.
SHERD_INLINE void prefetch(const std::uint16_t* line, Count stride) {
  __builtin_prefetch(line);
  __builtin_prefetch(line + stride);
}

void pairs(const void* from, Count stride, Count rows, Count cols, void* to, Count to_stride) {
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

}  // namespace

const TransposeOps transpose = {units, pairs};

}  // namespace sherd::tensor::cpu::SHERD_ISA
