#pragma once

#include "tensor/cpu/isa/vec.h"

// Products of small matrices held in registers. Operands are read in units of 32 bits along the inner extent:
// one fp32, or two neighbouring bf16. The left operand is row-major, so that a unit broadcasts straight from
// memory; the right one is packed into slivers of `sliver` columns, [units][sliver].

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

using Count = std::int64_t;

constexpr int sliver = 2 * lanes;
/// Rows of a register tile: enough sums in flight to hide the latency of a multiply-add.
#if defined(SHERD_ISA_avx512)
constexpr int tile_rows = 8;
#elif defined(SHERD_ISA_avx2)
constexpr int tile_rows = 6;
#else
constexpr int tile_rows = 4;
#endif

SHERD_INLINE F multiply_add(F a, F b, F sum) {
#if defined(SHERD_ISA_avx512)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(SHERD_ISA_avx2)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

SHERD_INLINE Count ceil_to(Count n, Count step) {
  return (n + step - 1) / step * step;
}

/// Operands in fp32.
struct DotF32 {
  using Element = float;
  static constexpr int per_unit = 1;
  SHERD_INLINE static F dot(F sum, U a, U b) { return multiply_add((F)a, (F)b, sum); }

  /// Registers of the per_unit neighbouring rows of a matrix whose columns are the lanes, rounded to
  /// elements; `second` counts for bf16 only.
  using Rounded = F;
  SHERD_INLINE static Rounded round(F first, F) { return first; }
  /// The rows as units, one per column.
  SHERD_INLINE static U unit(Rounded r) { return (U)r; }
  SHERD_INLINE static void store_row(float* to, Rounded r, int) { store_as(to, r); }
};

#if defined(SHERD_BF16_PRODUCTS)
/// Operands in bf16, two to a unit, multiplied in pairs by AVX512-BF16.
struct DotBf16 {
  using Element = std::uint16_t;
  static constexpr int per_unit = 2;
  SHERD_INLINE static F dot(F sum, U a, U b) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  using Rounded = U;  ///< sixteen elements of the first row, then sixteen of the second
  SHERD_INLINE static Rounded round(F first, F second) {
    return (U)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }
  SHERD_INLINE static U unit(Rounded r) {
    U order;
#pragma GCC unroll 16
    for (int l = 0; l < lanes; ++l) order[l] = static_cast<std::uint32_t>(l | (lanes + l) << 16);
    return (U)_mm512_permutexvar_epi16((__m512i)order, (__m512i)r);
  }
  SHERD_INLINE static void store_row(std::uint16_t* to, Rounded r, int row) {
    if (row == 0)
      store_as(to, __builtin_shufflevector(r, r, 0, 1, 2, 3, 4, 5, 6, 7));
    else
      store_as(to, __builtin_shufflevector(r, r, 8, 9, 10, 11, 12, 13, 14, 15));
  }
};
#endif

/// Sums of one tile, begun at c's values or at zero, to be written to c.
struct Plain {
  float* c;
  Count stride;
  bool add;

  SHERD_INLINE F begin(Count row, int part) const {
    return add ? load(c + row * stride + part * lanes) : F{};
  }
  SHERD_INLINE void end(Count row, F first, F second) const {
    store(c + row * stride, first);
    store(c + row * stride + lanes, second);
  }
};

/// A left operand that lies row by row, `stride` units apart.
struct LeftRows {
  const std::uint32_t* from;
  Count stride;

  SHERD_INLINE const std::uint32_t* tile(Count row) const { return from + row * stride; }
  /// Unit u of the tile's row r.
  SHERD_INLINE Count at(int r, Count u) const { return r * stride + u; }
};

/// The same, met for the first time: rows are asked for a tile ahead.
struct FirstLeftRows : LeftRows {
  SHERD_INLINE void ask_ahead(const std::uint32_t* tile_of, Count u) const {
    __builtin_prefetch(tile_of + (tile_rows + u % tile_rows) * stride + u / tile_rows * lanes, 0, 2);
  }
};

/// One that lies in slivers of `width` rows, a multiple of a tile's: [rows / width][units][width].
template <int width>
struct LeftSlivers {
  static_assert(width % tile_rows == 0);
  const std::uint32_t* from;
  Count units;

  SHERD_INLINE const std::uint32_t* tile(Count row) const {
    return from + row / width * width * units + row % width;
  }
  SHERD_INLINE Count at(int r, Count u) const { return u * width + r; }
};

/// sums[rows, sliver] = sums + left[rows, units]·b[units, sliver] from `row` on, where `sums` says where each
/// row begins and ends.
template <class Dot, int rows, class Left, class Sums>
SHERD_INLINE void multiply_tile(const Left& left, const std::uint32_t* b, Count units, Count row,
                                const Sums& sums) {
  const std::uint32_t* a = left.tile(row);
  F sum[rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sum[r][0] = sums.begin(row + r, 0), sum[r][1] = sums.begin(row + r, 1);
  for (Count u = 0; u < units; ++u) {
    if constexpr (requires { left.ask_ahead(a, u); }) left.ask_ahead(a, u);
    const U b0 = load_as<U>(b + u * sliver), b1 = load_as<U>(b + u * sliver + lanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const U x = all(load_as<std::uint32_t>(a + left.at(r, u)));
      sum[r][0] = Dot::dot(sum[r][0], x, b0);
      sum[r][1] = Dot::dot(sum[r][1], x, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sums.end(row + r, sum[r][0], sum[r][1]);
}

template <class Dot, int rows, class Left, class Sums>
SHERD_INLINE void multiply_last_rows(Count count, const Left& left, const std::uint32_t* b, Count units,
                                     Count row, const Sums& sums) {
  if (count == rows) return multiply_tile<Dot, rows>(left, b, units, row, sums);
  if constexpr (rows > 1) multiply_last_rows<Dot, rows - 1>(count, left, b, units, row, sums);
}

/// Nothing is known of what comes behind a sliver.
struct NothingAhead {
  SHERD_INLINE void ask(Count, Count) const {}
};

/// The right operand's next sliver, asked for in equal shares with each of `rows` rows.
struct SliverAhead {
  const std::uint32_t* from;
  Count units, rows;

  SHERD_INLINE void ask(Count begin, Count end) const {
    constexpr int line = 16;  // units of a cache line
    for (Count at = begin * units / rows * sliver; at < end * units / rows * sliver; at += line)
      __builtin_prefetch(from + at, 0, 2);
  }
};

/// The same for any number of rows. `ahead` says what to bring to the second-level cache meanwhile.
template <class Dot, class Left, class Sums, class Ahead = NothingAhead>
[[gnu::noinline]] void multiply_rows(const Left& left, Count rows, const std::uint32_t* b, Count units,
                                     const Sums& sums, const Ahead& ahead = {}) {
  Count r = 0;
  for (; r + tile_rows <= rows; r += tile_rows) {
    ahead.ask(r, r + tile_rows);
    multiply_tile<Dot, tile_rows>(left, b, units, r, sums);
  }
  if (r < rows) multiply_last_rows<Dot, tile_rows - 1>(rows - r, left, b, units, r, sums);
}

/// c[rows, sliver] (+)= a[rows, units]·b[units, sliver]. Strides in units and floats.
template <class Dot>
SHERD_INLINE void multiply_sliver(const void* a, Count a_stride, Count rows, const std::uint32_t* b,
                                  Count units, float* c, Count c_stride, bool add) {
  multiply_rows<Dot>(LeftRows{static_cast<const std::uint32_t*>(a), a_stride}, rows, b, units,
                     Plain{c, c_stride, add});
}

template <int distance>
SHERD_INLINE void swap_blocks(U (&rows)[lanes]) {
  I low, high;
#pragma GCC unroll 16
  for (int l = 0; l < lanes; ++l) {
    low[l] = (l & distance) ? lanes + l - distance : l;
    high[l] = (l & distance) ? lanes + l : l + distance;
  }
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if (i & distance) continue;
    const U a = rows[i], b = rows[i + distance];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + distance] = __builtin_shuffle(a, b, high);
  }
}

/// Transposes lanes × lanes units in registers.
SHERD_INLINE void transpose_square(U (&rows)[lanes]) {
  swap_blocks<1>(rows);
  swap_blocks<2>(rows);
#if defined(SHERD_ISA_avx2) || defined(SHERD_ISA_avx512)
  swap_blocks<4>(rows);
#endif
#if defined(SHERD_ISA_avx512)
  swap_blocks<8>(rows);
#endif
}

/// The first `count` of the units at `from`, zeros behind.
SHERD_INLINE U load_units(const std::uint32_t* from, Count count) {
  if (count >= lanes) return load_as<U>(from);
  std::uint32_t buffer[lanes] = {};
  __builtin_memcpy(buffer, from, static_cast<std::size_t>(count) * 4);
  return load_as<U>(buffer);
}
SHERD_INLINE void store_units(std::uint32_t* to, U u, Count count) {
  if (count >= lanes) return store_as(to, u);
  std::uint32_t buffer[lanes];
  store_as(buffer, u);
  __builtin_memcpy(to, buffer, static_cast<std::size_t>(count) * 4);
}

/// Whether a line is asked for a whole register, of which nothing lies outside the matrix.
template <bool value>
struct Whole {};

/// to[c·to_stride + r] = line(r, c) for r < rows, c < cols, where line(r, c, left, Whole) gives units c, c +
/// 1, … of row r, of which `left` exist; whole registers are asked for in the first `whole_rows` alone. Rows
/// up to `padded_rows` (≥ rows) are written as zeros. Goes down the rows once, so that what lies far apart is
/// read once.
template <class Line>
SHERD_INLINE void transpose_lines(Count rows, Count whole_rows, Count cols, Line line, std::uint32_t* to,
                                  Count to_stride, Count padded_rows) {
  for (Count r = 0; r < padded_rows; r += lanes)
    for (Count c = 0; c < cols; c += lanes) {
      U block[lanes];
      std::uint32_t* corner = to + c * to_stride + r;
      if (r + lanes <= whole_rows && c + lanes <= cols) {
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) block[i] = line(r + i, c, lanes, Whole<true>{});
        transpose_square(block);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store_as(corner + i * to_stride, block[i]);
        continue;
      }
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        block[i] = r + i < rows ? line(r + i, c, cols - c, Whole<false>{}) : U{};
      transpose_square(block);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        if (c + i < cols) store_units(corner + i * to_stride, block[i], padded_rows - r);
    }
}

/// Row-major units [rows, cols] to [cols, padded_rows].
[[maybe_unused]] void transpose_units(const std::uint32_t* from, Count stride, Count rows, Count cols,
                                      std::uint32_t* to, Count to_stride, Count padded_rows) {
  transpose_lines(
      rows, rows, cols,
      [=]<bool whole>(Count r, Count c, Count left, Whole<whole>) {
        // Rows may lie on pages of their own, where the processor does not read ahead.
        if constexpr (whole) __builtin_prefetch(from + (r + lanes) * stride + c, 0, 2);
        return whole ? load_as<U>(from + r * stride + c) : load_units(from + r * stride + c, left);
      },
      to, to_stride, padded_rows);
}

/// Units [c, c + lanes) of line `u` of a matrix [inner, cols] whose units go down its columns: element
/// (u·per_unit, c), and for bf16 its neighbour below. Zeros past `inner` and past `left` columns.
template <class Dot, bool whole>
SHERD_INLINE U column_units(const typename Dot::Element* from, Count stride, Count inner, Count u, Count c,
                            Count left, Whole<whole>) {
  if constexpr (Dot::per_unit == 1) {
    const auto* line = reinterpret_cast<const std::uint32_t*>(from) + u * stride + c;
    return whole ? load_as<U>(line) : load_units(line, left);
  } else {
    const auto row = [&](Count p) {
      const auto* line = from + p * stride + c;
      if constexpr (whole) return load_as<H>(line);
      if (p >= inner) return H{};
      if (left >= lanes) return load_as<H>(line);
      std::uint16_t buffer[lanes] = {};
      __builtin_memcpy(buffer, line, static_cast<std::size_t>(left) * 2);
      return load_as<H>(buffer);
    };
    return widen(row(2 * u)) | (widen(row(2 * u + 1)) << 16);
  }
}

/// Slivers [cols/sliver][units][sliver] of a row-major matrix [inner, cols], for the right of a product over
/// `inner`. Lanes past cols and rows past inner, up to a multiple of per_unit, are zeros. Slivers begin
/// `sliver_units` units apart. A few rows at a time, so that reading goes along them.
template <class Dot>
void pack_columns(const typename Dot::Element* from, Count stride, Count inner, Count cols, std::uint32_t* to,
                  Count sliver_units) {
  constexpr Count step = 8, ahead = 16;
  const Count units = (inner + Dot::per_unit - 1) / Dot::per_unit, whole_units = inner / Dot::per_unit;
  for (Count begin = 0; begin < units; begin += step)
    for (Count first = 0; first < cols; first += sliver) {
      std::uint32_t* sliver_of = to + first * sliver_units;
      for (Count u = begin; u < units && u < begin + step; ++u) {
#pragma GCC unroll 2
        for (int i = 0; i < Dot::per_unit; ++i)
          __builtin_prefetch(from + ((u + ahead) * Dot::per_unit + i) * stride + first, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
          const Count c = first + part * lanes;
          U unit{};
          if (u < whole_units && c + lanes <= cols)
            unit = column_units<Dot>(from, stride, inner, u, c, lanes, Whole<true>{});
          else if (c < cols)
            unit = column_units<Dot>(from, stride, inner, u, c, cols - c, Whole<false>{});
          store_as(sliver_of + u * sliver + part * lanes, unit);
        }
      }
    }
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
