#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// Infinity and NaN: all exponent bits set.
template <class S>
constexpr std::uint32_t exponent_mask = 0x7f80u;
template <>
constexpr std::uint32_t exponent_mask<F16> = 0x7c00u;

SHERD_INLINE bool any(I mask) {
  std::int32_t lane[lanes];
  __builtin_memcpy(lane, &mask, sizeof lane);
  std::int32_t bits = 0;
  for (int i = 0; i < lanes; ++i) bits |= lane[i];
  return bits != 0;
}

/// Eight running sums in double, folded in one fixed order.
struct SumD8 {
  static constexpr int parts = 16 / lanes;  // a D holds lanes/2 doubles
  D part[parts]{};

  SHERD_INLINE double total() const {
    double lane[8];
    __builtin_memcpy(lane, part, sizeof lane);
    for (int width = 4; width >= 1; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
  }
};

/// Adds the squares of 8 floats to `sum`.
SHERD_INLINE void add_squares(const float* x, SumD8& sum) {
#pragma GCC unroll 4
  for (int p = 0; p < SumD8::parts; ++p) {
    const D d = __builtin_convertvector(load_as<HalfF>(x + p * (lanes / 2)), D);
    sum.part[p] = sum.part[p] + d * d;
  }
}

template <class S>
struct Loops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  static void load_(const void* x, float* y, Count n) {
    map(n, y, [](F u) { return u; }, in(x));
  }
  static void store_(const float* x, void* y, Count n) {
    map(n, out(y), [](F u) { return u; }, x);
  }
  static void add_to(const void* x, float* sum, Count n) {
    map(n, sum, [](F s, F u) { return s + u; }, static_cast<const float*>(sum), in(x));
  }
  static void accumulate(const float* x, void* y, Count n) {
    map(n, out(y), [](F o, F u) { return o + u; }, in(y), x);
  }

  static bool all_finite(const void* x, Count n) {
    I bad{};
    Count i = 0;
    for (; i + lanes <= n; i += lanes) {
      if constexpr (sizeof(S) == 2)
        bad |= (widen(load_as<H>(in(x) + i)) & exponent_mask<S>) == exponent_mask<S>;
      else
        bad |= ((U)load(in(x) + i) & 0x7f800000u) == 0x7f800000u;
    }
    // Widening a 16-bit infinity or NaN gives one of fp32.
    if (i < n) bad |= ((U)load_tail(in(x) + i, n - i) & 0x7f800000u) == 0x7f800000u;
    return !any(bad);
  }

  static void block_squares(const void* x, double* sums, Count n) {
    float buffer[64];
    for (Count i = 0; i < n; i += 64, ++sums) {
      const float* block = buffer;
      if (n - i < 64) {
        for (float& value : buffer) value = 0;
        load_(in(x) + i, buffer, n - i);
      } else if constexpr (sizeof(S) == 4) {
        block = in(x) + i;
      } else {
#pragma GCC unroll 16
        for (int k = 0; k < 64; k += lanes) store(buffer + k, load(in(x) + i + k));
      }
      SumD8 sum;
#pragma GCC unroll 8
      for (int k = 0; k < 64; k += 8) add_squares(block + k, sum);
      *sums = sum.total();
    }
  }

  static double squared_difference(const void* x, const void* y, Count n) {
    SumD8 sum;
    float buffer[32];
    Count i = 0;
    for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 8
      for (int k = 0; k < 32; k += lanes) store(buffer + k, load(in(x) + i + k) - load(in(y) + i + k));
#pragma GCC unroll 4
      for (int k = 0; k < 32; k += 8) add_squares(buffer + k, sum);
    }
    if (i < n) {
      for (float& value : buffer) value = 0;
      map(n - i, buffer, [](F u, F v) { return u - v; }, in(x) + i, in(y) + i);
      for (int k = 0; k < 32; k += 8) add_squares(buffer + k, sum);
    }
    return sum.total();
  }
};

template <class S>
constexpr ConvertOps table() {
  using L = Loops<S>;
  return {L::load_,      L::store_,        L::add_to,            L::accumulate,
          L::all_finite, L::block_squares, L::squared_difference};
}

}  // namespace

const ConvertOps convert[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA
