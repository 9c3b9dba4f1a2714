#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

#if defined(SHERD_ISA_avx512)
/// How many sums of eight are folded at once: transposed, their folds fill whole registers.
constexpr int sums_at_once = 8;

/// totals[b] = sums[b].total().
SHERD_INLINE void store_totals(const SumD8 (&sums)[sums_at_once], double* totals) {
  D four[4], two[2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const D a = sums[2 * j].part[0], b = sums[2 * j + 1].part[0];
    four[j] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j)
    two[j] = __builtin_shufflevector(four[2 * j], four[2 * j + 1], 0, 1, 4, 5, 8, 9, 12, 13) +
             __builtin_shufflevector(four[2 * j], four[2 * j + 1], 2, 3, 6, 7, 10, 11, 14, 15);
  const D one = __builtin_shufflevector(two[0], two[1], 0, 8, 2, 10, 4, 12, 6, 14) +
                __builtin_shufflevector(two[0], two[1], 1, 9, 3, 11, 5, 13, 7, 15);
  store_as(totals, __builtin_shufflevector(one, one, 0, 2, 4, 6, 1, 3, 5, 7));
}
#else
constexpr int sums_at_once = 1;

SHERD_INLINE void store_totals(const SumD8 (&sums)[sums_at_once], double* totals) {
  *totals = sums[0].total();
}
#endif

template <class S>
struct Loops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  static void load_(const void* x, float* y, Count n) {
    map(
        n, y, [](F u) { return u; }, in(x));
  }
  static void store_(const float* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return u; }, x);
  }
  static void add_to(const void* x, float* sum, Count n) {
    map(
        n, sum, [](F s, F u) { return s + u; }, static_cast<const float*>(sum), in(x));
  }
  static void accumulate(const float* x, void* y, Count n) {
    map(
        n, out(y), [](F o, F u) { return o + u; }, in(y), x);
  }
  static void blend(const void* x, float factor, float* sum, float keep, Count n) {
    map(
        n, sum, [=](F s, F u) { return s * keep + u * factor; }, static_cast<const float*>(sum), in(x));
  }

  SHERD_INLINE static SumD8 block(const S* x) {
    SumD8 sum;
#pragma GCC unroll 16
    for (int k = 0; k < 64; k += lanes) add_squares(load(x + k), k, sum);
    return sum;
  }

  static void block_squares(const void* x, double* sums, Count n) {
    Count i = 0;
    for (; i + 64 * sums_at_once <= n; i += 64 * sums_at_once, sums += sums_at_once) {
      SumD8 several[sums_at_once];
#pragma GCC unroll 8
      for (int b = 0; b < sums_at_once; ++b) several[b] = block(in(x) + i + 64 * b);
      store_totals(several, sums);
    }
    for (; i + 64 <= n; i += 64) *sums++ = block(in(x) + i).total();
    if (i == n) return;
    float rest[64] = {};
    load_(in(x) + i, rest, n - i);
    SumD8 sum;
    for (int k = 0; k < 64; k += lanes) add_squares(load(rest + k), k, sum);
    *sums = sum.total();
  }

  static double squared_difference(const void* x, const void* y, Count n) {
    SumD8 sum;
    Count i = 0;
    for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 8
      for (int k = 0; k < 32; k += lanes) add_squares(load(in(x) + i + k) - load(in(y) + i + k), k, sum);
    }
    float rest[32] = {};
    map(
        n - i, rest, [](F u, F v) { return u - v; }, in(x) + i, in(y) + i);
    for (int k = 0; k < 32; k += lanes) add_squares(load(rest + k), k, sum);
    return sum.total();
  }
};

template <class S>
constexpr ConvertOps table() {
  using L = Loops<S>;
  return {L::load_, L::store_, L::add_to, L::accumulate, L::blend, L::block_squares, L::squared_difference};
}

}  // namespace

const ConvertOps convert[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA
