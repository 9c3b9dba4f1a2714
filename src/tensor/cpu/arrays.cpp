#include <algorithm>
#include <cstring>

#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

/// Elements of a side of a tile: two tiles' lines of memory stay in the first-level cache.
constexpr Count tile = 32;

/// Rows whose elements lie `step` apart, or repeat one.
template <class Bits>
void gather_rows(Device& device, const Bits* from, const ArrayLoops& loops, Count elements, Bits* to) {
  const Count columns = loops.columns(), step = loops.stride(0);
  in_chunks(device, elements, element_grain, [&](Count begin, Count count) {
    for (Count i = begin, n = 0; i < begin + count; i += n) {
      const Count column = i % columns;
      n = std::min(columns - column, begin + count - i);
      const Bits* x = from + loops.row_start(i / columns, 0) + column * step;
      if (step == 1)
        std::memcpy(to + i, x, static_cast<std::size_t>(n) * sizeof(Bits));
      else if (step == 0)
        std::fill_n(to + i, n, *x);
      else
        for (Count k = 0; k < n; ++k) to[i + k] = x[k * step];
    }
  });
}

/// The axis of a transposed array along which `from` is contiguous, or -1.
int dense_axis(const ArrayLoops& loops) {
  for (int axis = 0; axis + 1 < loops.rank; ++axis)
    if (loops.strides[0][static_cast<std::size_t>(axis)] == 1) return axis;
  return -1;
}

/// A transposed array: tiles of the axis along which `from` is dense and the last one, along which `to` is.
template <class Bits>
void gather_tiles(Device& device, const Bits* from, const ArrayLoops& loops, int dense, Count elements,
                  Bits* to) {
  const auto axis = static_cast<std::size_t>(dense);
  const Count columns = loops.columns(), step = loops.stride(0), rows = loops.extents[axis];
  Count row_step = columns;  // in `to`
  for (int k = loops.rank - 2; k > dense; --k) row_step *= loops.extents[static_cast<std::size_t>(k)];
  const Count tiles = (rows + tile - 1) / tile, others = elements / (rows * columns);
  for_items(device, others * tiles, row_grain(tile * columns), [&](Count task) {
    // The other axes' indices: those before `dense` and those between it and the last.
    const Count inner = row_step / columns, other = task / tiles;
    const Count row = (other / inner * rows * inner) + other % inner;  // at index 0 of `dense`
    const Bits* x = from + loops.row_start(row, 0);
    Bits* y = to + row * columns;
    const Count first = task % tiles * tile, last = std::min(rows, first + tile);
    for (Count c = 0; c < columns; c += tile)
      for (Count r = first; r < last; ++r)
        for (Count k = c; k < std::min(columns, c + tile); ++k) y[r * row_step + k] = x[r + k * step];
  });
}

template <class Bits>
void gather(Device& device, const Tensor& from, const ArrayLoops& loops, const Tensor& to) {
  const auto* x = reinterpret_cast<const Bits*>(from.raw());
  auto* y = reinterpret_cast<Bits*>(to.raw());
  const int dense = loops.stride(0) > 1 ? dense_axis(loops) : -1;
  if (dense < 0) return gather_rows(device, x, loops, to.numel(), y);
  gather_tiles(device, x, loops, dense, to.numel(), y);
}

}  // namespace

void CpuKernels::copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) {
  const ArrayLoops loops = check_copy_strided(from, strides, to);
  if (to.numel() == 0) return;
  with_bits(to.dtype(), [&](auto zero) { gather<decltype(zero)>(device_, from, loops, to); });
}

}  // namespace sherd::tensor::cpu
