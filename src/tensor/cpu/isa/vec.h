#pragma once

// Vectors for the sources that sherd_isa_sources() compiles once per instruction set. Everything here has internal
// linkage, and the sources include no header with inline functions of external linkage, so that no AVX code can
// be merged into functions that portable code calls.

#include <immintrin.h>

#include <cstdint>

#define SHERD_INLINE [[gnu::always_inline]] inline

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// Lanes of one register. Arithmetic is element by element and contraction is off, so the number of lanes does not
/// show in any result; sums across elements use Sum32, whose lanes are the same everywhere.
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

SHERD_INLINE F all(float value) { return value - F{}; }
SHERD_INLINE U all(std::uint32_t value) { return value - U{}; }

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

SHERD_INLINE U widen(H h) { return __builtin_convertvector(h, U); }
SHERD_INLINE H narrow(U u) { return __builtin_convertvector(u, H); }

SHERD_INLINE F from_bf16(H h) { return (F)(widen(h) << 16); }

/// To nearest, ties to even; a NaN stays one (base/dtype.h, bf16(float)).
SHERD_INLINE H to_bf16(F f) {
  const U u = (U)f;
  const U rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const I is_nan = f != f;
  return narrow((is_nan ? (u | 0x400000u) : rounded) >> 16);
}

SHERD_INLINE F from_f16(H h) {
  const U u = widen(h);
  const U shifted = (u & 0x7fffu) << 13;
  const U exponent = u & 0x7c00u;
  const U normal = shifted + 0x38000000u;
  // A subnormal m is read as 2^-14·(1 + m/1024); no subnormal fp32 is formed, which the processor would flush.
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

SHERD_INLINE F load(const float* from) { return load_as<F>(from); }
SHERD_INLINE F load(const Bf16* from) { return from_bf16(load_as<H>(from)); }
SHERD_INLINE F load(const F16* from) { return from_f16(load_as<H>(from)); }
SHERD_INLINE void store(float* to, F f) { store_as(to, f); }
SHERD_INLINE void store(Bf16* to, F f) { store_as(to, to_bf16(f)); }
SHERD_INLINE void store(F16* to, F f) { store_as(to, to_f16(f)); }

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

SHERD_INLINE F max(F a, F b) { return a > b ? a : b; }
SHERD_INLINE F abs(F a) { return (F)((U)a & 0x7fffffffu); }

/// out[i] = f(xs[i]...) for i in [0, n).
template <class Out, class Fn, class... In>
SHERD_INLINE void map(std::int64_t n, Out* out, Fn f, const In*... xs) {
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const F first = f(load(xs + i)...);
    const F second = f(load(xs + i + lanes)...);
    store(out + i, first);
    store(out + i + lanes, second);
  }
  for (; i + lanes <= n; i += lanes) store(out + i, f(load(xs + i)...));
  if (i < n) store_tail(out + i, f(load_tail(xs + i, n - i)...), n - i);
}

/// Thirty-two running sums, folded in one fixed order: lane l takes elements l, l + 32, … on every instruction set.
struct Sum32 {
  static constexpr int parts = 32 / lanes;
  F part[parts]{};

  SHERD_INLINE float total() const {
    float lane[32];
    __builtin_memcpy(lane, part, sizeof lane);
    for (int width = 16; width >= 1; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
  }
};

/// Calls f(part, offset, xs...) for each register of [0, n) in order; the last registers are padded with zeros and
/// `count` says how many lanes are real.
template <class Fn, class... In>
SHERD_INLINE void for_each_32(std::int64_t n, Fn f, const In*... xs) {
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 8
    for (int p = 0; p < Sum32::parts; ++p) f(p, i + p * lanes, lanes, load(xs + i + p * lanes)...);
  }
#pragma GCC unroll 8
  for (int p = 0; p < Sum32::parts; ++p) {
    const std::int64_t left = n - i - p * lanes;
    if (left >= lanes)
      f(p, i + p * lanes, lanes, load(xs + i + p * lanes)...);
    else if (left > 0)
      f(p, i + p * lanes, static_cast<int>(left), load_tail(xs + i + p * lanes, left)...);
  }
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
