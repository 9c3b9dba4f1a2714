#pragma once

#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

// Products of packed panels by register tiles: each element of the result is one sum along the depth, in
// order, of the same instructions, whatever the number of rows and columns beside it.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// One sliver's sums on their way through memory. What a tile is added to is asked for when it begins and
/// read when it ends, so that nobody waits for a cache.
struct PartialSums {
  float* c;
  Count stride;
  bool add;

  SHERD_INLINE F begin(Count row, int part) const {
    __builtin_prefetch(c + row * stride + part * lanes, 1);
    return F{};
  }
  SHERD_INLINE void end(Count row, F first, F second) const {
    float* to = c + row * stride;
    if (add) first = load(to) + first, second = load(to + lanes) + second;
    store(to, first), store(to + lanes, second);
  }
};

/// One sliver's sums on their way to the result.
template <class Dot>
struct Finished {
  const float* c;
  Count c_stride;
  bool add;
  const GemmFinish& finish;
  Count col, cols;  ///< columns of the result; the sliver may be wider

  SHERD_INLINE F begin(Count row, int part) const {
    if (add) __builtin_prefetch(c + row * c_stride + part * lanes);
    const Count at = row * finish.out_stride + col + part * lanes;
    if (finish.wide)
      __builtin_prefetch(static_cast<float*>(finish.out) + at, 1);
    else if (part == 0)
      __builtin_prefetch(static_cast<Bf16*>(finish.out) + at, 1);
    return F{};
  }

  SHERD_INLINE void end(Count row, F first, F second) const {
    if (add) first = load(c + row * c_stride) + first, second = load(c + row * c_stride + lanes) + second;
    if (finish.folds) round_alone(first, second);
    if (finish.bias)
      first = first + load(finish.bias + col), second = second + load(finish.bias + col + lanes);
    const Count at = row * finish.out_stride + col;
    if (finish.wide)
      write(static_cast<float*>(finish.out) + at, first, second);
    else
      write(static_cast<Bf16*>(finish.out) + at, first, second);
  }

 private:
  /// The product that would be made apart, as bf16.
  SHERD_INLINE void round_alone(F& first, F& second) const {
    if (finish.wide) {
      first = (F)(round_to_bf16(first) & 0xffff0000u), second = (F)(round_to_bf16(second) & 0xffff0000u);
    } else {
      Bf16 alone[sliver];
      store_whole(alone, first, second);
      first = load(alone), second = load(alone + lanes);
    }
  }

  template <class S>
  SHERD_INLINE void write(S* out, F first, F second) const {
    if (cols - col < sliver) [[unlikely]]
      return write_last(out, first, second);
    if (finish.accumulate) first = load(out) + first, second = load(out + lanes) + second;
    store_whole(out, first, second);
  }

  template <class S>
  [[gnu::noinline]] void write_last(S* out, F first, F second) const {
    S sliver_of_out[sliver] = {};
    const auto bytes = static_cast<std::size_t>(cols - col) * sizeof(S);
    if (finish.accumulate) {
      __builtin_memcpy(sliver_of_out, out, bytes);
      first = load(sliver_of_out) + first, second = load(sliver_of_out + lanes) + second;
    }
    store_whole(sliver_of_out, first, second);
    __builtin_memcpy(out, sliver_of_out, bytes);
  }

  SHERD_INLINE void store_whole(float* out, F first, F second) const {
    store(out, first), store(out + lanes, second);
  }
  SHERD_INLINE void store_whole(Bf16* out, F first, F second) const {
    if constexpr (Dot::per_unit == 2)
      store_as(out, Dot::round(first, second));
    else
      store_pair<false>(out, {first, second});
  }
};

template <class Dot>
struct GemmTiles {
  using Element = typename Dot::Element;

  static void pack_rows(const void* b, Count stride, Count units, Count cols, void* packed) {
    const auto* from = static_cast<const std::uint32_t*>(b);
    auto* to = static_cast<std::uint32_t*>(packed);
    for (Count c = 0; c < cols; c += sliver, to += units * sliver)
      transpose_units(from + c * stride, stride, cols - c < sliver ? cols - c : sliver, units, to, sliver,
                      sliver);
  }

  static void pack_columns(const void* b, Count stride, Count inner, Count cols, void* packed,
                           Count sliver_units) {
    SHERD_ISA::pack_columns<Dot>(static_cast<const Element*>(b), stride, inner, cols,
                                 static_cast<std::uint32_t*>(packed), sliver_units);
  }

  /// Slivers as wide as a tile is high where those of pack_columns() are no multiple of it.
  static constexpr int left_sliver = sliver % tile_rows == 0 ? sliver : tile_rows;

  static void pack_left(const void* a, Count stride, Count inner, Count rows, void* packed) {
    if constexpr (left_sliver == sliver) {
      pack_columns(a, stride, inner, rows, packed, (inner + Dot::per_unit - 1) / Dot::per_unit);
    } else {
      static_assert(Dot::per_unit == 1);
      pack_narrow(static_cast<const std::uint32_t*>(a), stride, inner, rows,
                  static_cast<std::uint32_t*>(packed));
    }
  }

  static void multiply(const void* a, Count a_stride, Count rows, const void* packed, const GemmPart& part,
                       Count cols, float* c, Count c_stride, const GemmFinish* finish) {
    const auto* from = static_cast<const std::uint32_t*>(a);
    const LeftRows left{from, a_stride};
    const LeftSlivers<left_sliver> slivers{from, part.count};
    if (a_stride == 0)
      multiply_by(slivers, slivers, rows, packed, part, cols, c, c_stride, finish);
    else
      multiply_by(FirstLeftRows{left}, left, rows, packed, part, cols, c, c_stride, finish);
  }

 private:
  /// A few rows at a time, so that reading goes along them.
  static void pack_narrow(const std::uint32_t* from, Count stride, Count inner, Count rows,
                          std::uint32_t* to) {
    constexpr Count step = 8, ahead = 16;
    const Count whole = rows / left_sliver * left_sliver;
    for (Count begin = 0; begin < inner; begin += step)
      for (Count u = begin; u < inner && u < begin + step; ++u) {
        const std::uint32_t* line = from + u * stride;
        for (Count r = 0; r < rows; r += lanes) __builtin_prefetch(line + ahead * stride + r, 0, 2);
        std::uint32_t* unit = to + u * left_sliver;
        for (Count r = 0; r < whole; r += left_sliver, unit += inner * left_sliver)
          __builtin_memcpy(unit, line + r, left_sliver * sizeof *unit);
        for (Count r = whole; r < whole + left_sliver && whole < rows; ++r)
          unit[r - whole] = r < rows ? line[r] : 0;
      }
  }

  /// The data that is asked for while a sliver is multiplied: fp32's next one. bf16's are deeper and
  /// multiplied at twice the rate, so that asking costs more than it brings.
  static auto ahead_of(const std::uint32_t* next, Count units, Count rows) {
    if constexpr (Dot::per_unit == 1)
      return SliverAhead{next, units, rows};
    else
      return NothingAhead{};
  }

  template <class FirstLeft, class Left>
  static void multiply_by(const FirstLeft& first_left, const Left& left, Count rows, const void* packed,
                          const GemmPart& part, Count cols, float* c, Count c_stride,
                          const GemmFinish* finish) {
    for (Count col = 0; col < cols; col += sliver) {
      const auto* b = static_cast<const std::uint32_t*>(packed) + (col * part.units + part.first * sliver);
      const auto ahead = ahead_of(b + part.units * sliver, part.count, rows);
      float* sums = c ? c + col : nullptr;
      const auto by = [&](const auto& a) {
        if (finish)
          multiply_rows<Dot>(a, rows, b, part.count,
                             Finished<Dot>{sums, c_stride, part.add, *finish, col, cols}, ahead);
        else
          multiply_rows<Dot>(a, rows, b, part.count, PartialSums{sums, c_stride, part.add}, ahead);
      };
      col == 0 ? by(first_left) : by(left);
    }
  }
};

template <class Dot>
constexpr GemmOps gemm_ops() {
  using Tiles = GemmTiles<Dot>;
  return {sliver,           Tiles::left_sliver, Dot::per_unit, Tiles::pack_rows, Tiles::pack_columns,
          Tiles::pack_left, Tiles::multiply};
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
