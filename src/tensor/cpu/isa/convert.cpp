#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

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
