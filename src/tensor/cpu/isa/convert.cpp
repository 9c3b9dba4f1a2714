#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

#if defined(SHERD_ISA_avx512)
SHERD_INLINE F widen_codes(const std::int8_t* from) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (F)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, codes));
}
#else
SHERD_INLINE F widen_codes(const std::int8_t* from) {
  using Codes = std::int8_t __attribute__((vector_size(lanes)));
  return __builtin_convertvector(__builtin_convertvector(load_as<Codes>(from), I), F);
}
#endif

template <class S>
struct ConvertLoops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  static void load_(const void* x, float* y, Count n) {
    map([](F u) { return u; }, n, y, in(x));
  }
  static void store_(const float* x, void* y, Count n) {
    map([](F u) { return u; }, n, out(y), x);
  }
  static void add_to(const void* x, float* sum, Count n) {
    map([](F s, F u) { return s + u; }, n, sum, static_cast<const float*>(sum), in(x));
  }
  static void accumulate(const float* x, void* y, Count n) {
    map([](F o, F u) { return o + u; }, n, out(y), in(y), x);
  }
  static void blend(const void* x, float factor, float* sum, float keep, Count n) {
    map([=](F s, F u) { return s * keep + u * factor; }, n, sum, static_cast<const float*>(sum), in(x));
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
    map([](F u, F v) { return u - v; }, n - i, rest, in(x) + i, in(y) + i);
    for (int k = 0; k < 32; k += lanes) add_squares(load(rest + k), k, sum);
    return sum.total();
  }

  static void from_int8(const void* blocks, void* y, Count count) {
    constexpr Count block = 64, bytes = block + 4;  // int8_blocks.h
    const auto* from = static_cast<const std::int8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += bytes, to += block) {
      float scale;
      __builtin_memcpy(&scale, from + block, sizeof scale);
#pragma GCC unroll 16
      for (Count k = 0; k < block; k += lanes) store(to + k, widen_codes(from + k) * all(scale));
    }
  }
};

template <class S>
constexpr ConvertOps table() {
  using L = ConvertLoops<S>;
  return {L::load_,    L::store_, L::add_to, L::accumulate, L::blend, L::block_squares, L::squared_difference,
          L::from_int8};
}

}  // namespace

const ConvertOps convert[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA
