#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

void units(const void* from, Count stride, Count rows, Count cols, void* to, Count to_stride) {
  transpose_units(static_cast<const std::uint32_t*>(from), stride, rows, cols, static_cast<std::uint32_t*>(to),
                  to_stride, rows);
}

struct Halves {
  using Element = std::uint16_t;
  static constexpr int per_unit = 2;
};

void pairs(const void* from, Count stride, Count rows, Count cols, void* to, Count to_stride) {
  const auto* elements = static_cast<const std::uint16_t*>(from);
  const Count lines = (rows + 1) / 2;
  transpose_lines(
      lines, cols,
      [=](Count u, Count c, Count left) { return column_units<Halves>(elements, stride, rows, u, c, left); },
      static_cast<std::uint32_t*>(to), to_stride, lines);
}

}  // namespace

const TransposeOps transpose = {units, pairs};

}  // namespace sherd::tensor::cpu::SHERD_ISA
