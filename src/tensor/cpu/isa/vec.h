#pragma once

// Vectors for the sources that sherd_isa_sources() compiles once per instruction set. Everything here has
// internal linkage, and the sources include no header with inline functions of external linkage, so that no
// AVX code can be merged into functions that portable code calls.

#include <immintrin.h>

#include <cstdint>

#define SHERD_INLINE [[gnu::always_inline]] inline

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// Lanes of one register. Arithmetic is element by element and contraction is off, so the number of lanes
/// does not show in any result; sums across elements use Sum32, whose lanes are the same everywhere.
#if defined(SHERD_ISA_avx512)
constexpr int lanes = 16;
#elif defined(SHERD_ISA_avx2)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

using F = float __attribute__((vector_size(4 * lanes)));
using I = std::int32_t __attribute__((vector_size(4 * lanes)));
using U = std::uint32_t __attribute__((vector_size(4 * lanes)));
using H = std::uint16_t __attribute__((vector_size(2 * lanes)));
using D = double __attribute__((vector_size(4 * lanes)));
using HalfF = float __attribute__((vector_size(2 * lanes)));

/// Storage of 16-bit floats; base/dtype.h's types have inline functions and stay out of these sources.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

SHERD_INLINE F all(float value) {
  return value - F{};
}
SHERD_INLINE U all(std::uint32_t value) {
  return value - U{};
}

template <class V, class T>
SHERD_INLINE V load_as(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
SHERD_INLINE void store_as(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

#if defined(SHERD_ISA_avx512)
// GCC 12 widens 512 bits in two halves, and warns of the plain intrinsic.
SHERD_INLINE U widen(H h) {
  return (U)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
}
SHERD_INLINE D widen(HalfF f) {
  return (D)_mm512_maskz_cvtps_pd(0xff, (__m256)f);
}
#else
SHERD_INLINE U widen(H h) {
  return __builtin_convertvector(h, U);
}
SHERD_INLINE D widen(HalfF f) {
  return __builtin_convertvector(f, D);
}
#endif
/// The lower halves of u; and the upper halves of a, then of b.
#if defined(SHERD_ISA_avx512)
SHERD_INLINE H narrow(U u) {
  return (H)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)u);
}
SHERD_INLINE U upper_halves(U a, U b) {
  using W = std::uint16_t __attribute__((vector_size(64)));
  const W odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (U)_mm512_permutex2var_epi16((__m512i)a, (__m512i)odd, (__m512i)b);
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE H narrow(U u) {
  return __builtin_convertvector(u, H);
}
SHERD_INLINE U upper_halves(U a, U b) {
  const __m256i packed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
  return (U)_mm256_permute4x64_epi64(packed, 0xd8);
}
#else
SHERD_INLINE H narrow(U u) {
  return __builtin_convertvector(u, H);
}
SHERD_INLINE U upper_halves(U a, U b) {
  return (U)_mm_packs_epi32((__m128i)((I)a >> 16), (__m128i)((I)b >> 16));
}
#endif

SHERD_INLINE F from_bf16(H h) {
  return (F)(widen(h) << 16);
}

/// The bf16 in the upper halves: to nearest, ties to even; a NaN stays one (base/dtype.h, bf16(float)).
/// round_number_to_bf16() takes numbers, infinities, and no NaN but the one that processors make themselves.
SHERD_INLINE U round_number_to_bf16(F f) {
  const U u = (U)f;
  return u + 0x7fffu + ((u >> 16) & 1u);
}
SHERD_INLINE U round_to_bf16(F f) {
  const I is_nan = f != f;
  return is_nan ? ((U)f | 0x400000u) : round_number_to_bf16(f);
}
SHERD_INLINE H to_bf16(F f) {
  return narrow(round_to_bf16(f) >> 16);
}

SHERD_INLINE F from_f16(H h) {
  const U u = widen(h);
  const U shifted = (u & 0x7fffu) << 13;
  const U exponent = u & 0x7c00u;
  const U normal = shifted + 0x38000000u;
  // A subnormal m is read as 2^-14·(1 + m/1024); no subnormal fp32 is formed, which the processor would
  // flush.
  const U subnormal = (U)((F)(shifted + 0x38800000u) - 0x1p-14f);
  U magnitude = exponent == 0u ? subnormal : normal;
  magnitude = exponent == 0x7c00u ? normal + 0x38000000u : magnitude;
  return (F)(magnitude | ((u & 0x8000u) << 16));
}

SHERD_INLINE H to_f16(F f) {
  const U u = (U)f;
  const U magnitude = u & 0x7fffffffu;
  const U normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const U subnormal = (U)((F)magnitude + 0.5f) - 0x3f000000u;
  const I as_int = (I)magnitude;
  U half = as_int < 0x38800000 ? subnormal : normal;
  half = as_int >= 0x477ff000 ? all(0x7c00u) : half;
  half = as_int > 0x7f800000 ? all(0x7e00u) : half;
  return narrow(half | ((u >> 16) & 0x8000u));
}

SHERD_INLINE F load(const float* from) {
  return load_as<F>(from);
}
SHERD_INLINE F load(const Bf16* from) {
  return from_bf16(load_as<H>(from));
}
SHERD_INLINE F load(const F16* from) {
  return from_f16(load_as<H>(from));
}
SHERD_INLINE void store(float* to, F f) {
  store_as(to, f);
}
SHERD_INLINE void store(Bf16* to, F f) {
  store_as(to, to_bf16(f));
}
SHERD_INLINE void store(F16* to, F f) {
  store_as(to, to_f16(f));
}

/// The last n < lanes elements; the lanes past them hold `padding`'s bits.
template <class S>
SHERD_INLINE F load_tail(const S* from, std::int64_t n, S padding = S{}) {
  S buffer[lanes];
  for (int i = 0; i < lanes; ++i) buffer[i] = padding;
  __builtin_memcpy(buffer, from, static_cast<std::size_t>(n) * sizeof(S));
  return load(buffer);
}
template <class S>
SHERD_INLINE void store_tail(S* to, F f, std::int64_t n) {
  S buffer[lanes];
  store(buffer, f);
  __builtin_memcpy(to, buffer, static_cast<std::size_t>(n) * sizeof(S));
}

/// b where a is a NaN or not the larger.
#if defined(SHERD_ISA_avx512)
SHERD_INLINE F max(F a, F b) {
  return (F)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE F max(F a, F b) {
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
}
#else
SHERD_INLINE F max(F a, F b) {
  return (F)_mm_max_ps((__m128)a, (__m128)b);
}
#endif
SHERD_INLINE F abs(F a) {
  return (F)((U)a & 0x7fffffffu);
}

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

/// Two registers of consecutive elements. `split` ones hold the even and the odd elements: for bf16 that
/// costs one operation each way where the plain order costs several, and element-wise work does not see it.
struct Pair {
  F a, b;
};
template <bool split, class S>
SHERD_INLINE Pair load_pair(const S* from) {
  if constexpr (split && same_type<S, Bf16>) {
    const U both = load_as<U>(from);
    return {(F)(both << 16), (F)(both & 0xffff0000u)};
  } else {
    return {load(from), load(from + lanes)};
  }
}
template <bool split, class S>
SHERD_INLINE void store_pair(S* to, Pair pair) {
  if constexpr (split && same_type<S, Bf16>) {
    store_as(to, (round_to_bf16(pair.a) >> 16) | (round_to_bf16(pair.b) & 0xffff0000u));
  } else if constexpr (same_type<S, Bf16>) {
    store_as(to, upper_halves(round_to_bf16(pair.a), round_to_bf16(pair.b)));
  } else {
    store(to, pair.a);
    store(to + lanes, pair.b);
  }
}

/// out[i] = f(xs[i]...) for i in [0, n).
template <class Fn, class Out, class... In>
SHERD_INLINE void map(Fn f, std::int64_t n, Out* out, const In*... xs) {
  constexpr bool split = (same_type<Out, In> && ...);
  const auto both = [&](auto... x) { return Pair{f(x.a...), f(x.b...)}; };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) store_pair<split>(out + i, both(load_pair<split>(xs + i)...));
  for (; i + lanes <= n; i += lanes) store(out + i, f(load(xs + i)...));
  if (i < n) store_tail(out + i, f(load_tail(xs + i, n - i)...), n - i);
}

/// Thirty-two running sums over elements stored as S, folded in one fixed order: sum k takes elements k, k +
/// 32, … on every instruction set, wherever load_pair() put them.
template <class S>
struct Sum32 {
  static constexpr int parts = 32 / lanes;
  F part[parts]{};

  SHERD_INLINE float total() const {
    float held[32], lane[32];
    __builtin_memcpy(held, part, sizeof held);
    for (int i = 0; i < 32; ++i) {
      const int within = i % (2 * lanes);
      lane[i] = same_type<S, Bf16> ? held[i - within + within % 2 * lanes + within / 2] : held[i];
    }
    for (int width = 16; width >= 1; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
  }
};

/// Eight running sums in double, folded in one fixed order.
struct SumD8 {
  static constexpr int parts = 16 / lanes;  // a D holds lanes/2 doubles
  D part[parts]{};

  /// Lane i + lane i + 4, then i + 2, then i + 1.
  SHERD_INLINE double total() const {
    using D2 = double __attribute__((vector_size(16)));
#if defined(SHERD_ISA_portable)
    const D2 two = (part[0] + part[2]) + (part[1] + part[3]);
#else
    using D4 = double __attribute__((vector_size(32)));
#if defined(SHERD_ISA_avx512)
    const D4 four = __builtin_shufflevector(part[0], part[0], 0, 1, 2, 3) +
                    __builtin_shufflevector(part[0], part[0], 4, 5, 6, 7);
#else
    const D4 four = part[0] + part[1];
#endif
    const D2 two = __builtin_shufflevector(four, four, 0, 1) + __builtin_shufflevector(four, four, 2, 3);
#endif
    return two[0] + two[1];
  }
};

/// sum + d * d. The square of a float is exact in double, so that fusing the two, where that is faster, shows
/// in no bit.
SHERD_INLINE D add_square(D sum, D d) {
#if defined(SHERD_ISA_avx512)
  return (D)_mm512_fmadd_pd((__m512d)d, (__m512d)d, (__m512d)sum);
#elif defined(SHERD_ISA_avx2)
  return (D)_mm256_fmadd_pd((__m256d)d, (__m256d)d, (__m256d)sum);
#else
  return sum + d * d;
#endif
}

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

/// Adds the squares of the `lanes` elements that lie `offset`, a multiple of lanes, past a multiple of 8.
SHERD_INLINE void add_squares(F f, int offset, SumD8& sum) {
  HalfF half[2];
  __builtin_memcpy(half, &f, sizeof f);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const D d = widen(half[h]);
    D& part = sum.part[(offset + h * (lanes / 2)) % 8 / (lanes / 2)];
    part = add_square(part, d);
  }
}

/// Calls f(part, real, x...) for each register of the n elements behind each of xs, in order; `part` counts
/// within groups of 32. The last group is filled up with zeros, and `real` is the mask of the lanes that are
/// not filling.
template <class Fn, class S, class... In>
SHERD_INLINE void for_each_32(Fn f, std::int64_t n, const S* first, const In*... others) {
  static_assert((same_type<S, In> && ...));
  const I everywhere = I{} == I{};
  const auto both = [&](int p, I real_a, I real_b, auto... x) {
    f(p, real_a, x.a...);
    f(p + 1, real_b, x.b...);
  };
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 4
    for (int p = 0; p < 32 / lanes; p += 2)
      both(p, everywhere, everywhere, load_pair<true>(first + i + p * lanes),
           load_pair<true>(others + i + p * lanes)...);
  }
  if (i == n) return;
  struct Padded {
    S element[32];
  };
  const auto pad = [&](const S* from) {
    Padded out{};
    __builtin_memcpy(out.element, from, static_cast<std::size_t>(n - i) * sizeof(S));
    return out;
  };
  Padded marks{};  // any bits that are not zero mark a real element
  for (std::int64_t k = 0; k < n - i; ++k) __builtin_memset(&marks.element[k], 0x3f, sizeof(S));
  const auto tail = [&](const auto&... padded) {
#pragma GCC unroll 4
    for (int p = 0; p < 32 / lanes; p += 2) {
      const Pair mark = load_pair<true>(marks.element + p * lanes);
      both(p, mark.a != 0.0f, mark.b != 0.0f, load_pair<true>(padded.element + p * lanes)...);
    }
  };
  tail(pad(first + i), pad(others + i)...);
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
