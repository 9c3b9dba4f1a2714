#pragma once

#include "tensor/cpu/isa/tiles.h"

// The products of tiles.h by AMX: the same operands in the same order of memory, multiplied 16 by 16 rows and
// columns at a time.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr Count tile_side = 16;   ///< rows of a tile of sums and of its left operand, and columns
constexpr Count tile_units = 16;  ///< along the inner extent

/// Shapes of the registers that multiply_tiles() takes, for this thread; costs about as much as one product
/// of full tiles.
struct TileShapes {
  alignas(64) std::uint8_t bytes[64] = {1};

  TileShapes(Count rows, Count units) {
    shape(0, rows, tile_side * 4), shape(1, rows, tile_side * 4);
    shape(2, tile_side, tile_side * 4), shape(3, tile_side, tile_side * 4);
    shape(4, rows, units * 4), shape(5, tile_side, units * 4);
    shape(6, units, tile_side * 4), shape(7, units, tile_side * 4);
    _tile_loadconfig(bytes);
  }

 private:
  void shape(int tile, Count rows, Count row_bytes) {
    bytes[16 + 2 * tile] = static_cast<std::uint8_t>(row_bytes);
    bytes[48 + tile] = static_cast<std::uint8_t>(rows);
  }
};

/// Two bf16 to a unit, as DotBf16; products of slivers by AMX.
struct DotAmx : DotBf16 {};

/// c[16 or 32 rows, sliver] (+)= a·b over `steps` tiles of the inner extent; the shapes are set.
template <bool two>
SHERD_INLINE void multiply_tiles(const std::uint32_t* a, Count a_stride, const std::uint32_t* b, Count steps,
                                 Count step_units, float* c, Count c_stride, bool add) {
  const Count c_bytes = c_stride * 4, a_bytes = a_stride * 4;
  float* second = c + tile_side * c_stride;
  asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read and write memory
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + tile_side, c_bytes);
    if (two) {
      _tile_loadd(2, second, c_bytes);
      _tile_loadd(3, second + tile_side, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (Count s = 0; s < steps; ++s, a += step_units, b += step_units * sliver) {
    _tile_loadd(6, b, sliver * 4);
    _tile_loadd(7, b + tile_side, sliver * 4);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!two) continue;
    _tile_loadd(5, a + tile_side * a_stride, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + tile_side, c_bytes);
  if (two) {
    _tile_stored(2, second, c_bytes);
    _tile_stored(3, second + tile_side, c_bytes);
  }
  asm volatile("" ::: "memory");
}

/// All rows, over `steps` tiles of `step_units` of the inner extent.
[[gnu::noinline]] void multiply_all_rows(const std::uint32_t* a, Count a_stride, Count rows,
                                         const std::uint32_t* b, Count steps, Count step_units, float* c,
                                         Count c_stride, bool add) {
  const TileShapes whole(tile_side, step_units);
  Count r = 0;
  for (; r + 2 * tile_side <= rows; r += 2 * tile_side)
    multiply_tiles<true>(a + r * a_stride, a_stride, b, steps, step_units, c + r * c_stride, c_stride, add);
  for (; r < rows; r += tile_side) {
    if (rows - r < tile_side) TileShapes last(rows - r, step_units);
    multiply_tiles<false>(a + r * a_stride, a_stride, b, steps, step_units, c + r * c_stride, c_stride, add);
  }
  _tile_release();
}

template <>
void multiply_sliver<DotAmx>(const void* a, Count a_stride, Count rows, const std::uint32_t* b, Count units,
                             float* c, Count c_stride, bool add) {
  const auto* left = static_cast<const std::uint32_t*>(a);
  const Count steps = units / tile_units, whole = steps * tile_units;
  if (steps > 0) multiply_all_rows(left, a_stride, rows, b, steps, tile_units, c, c_stride, add);
  if (whole < units)
    multiply_all_rows(left + whole, a_stride, rows, b + whole * sliver, 1, units - whole, c, c_stride,
                      add || steps > 0);
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
