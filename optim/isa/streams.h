#pragma once

#include "tensor/cpu/isa/vec.h"

// How the loops of the update rules read and write their streams, one pair of registers (2·lanes elements) at
// a time. A pair holds consecutive elements, or, where `split` is set, the even elements in `a` and the odd
// ones in `b`: 16-bit streams then need shifts and masks alone, in place of shuffles. Rules work element by
// element and do not see the order.

namespace sherd::optim::SHERD_ISA {
namespace {

using namespace sherd::tensor::cpu::SHERD_ISA;

// On a lambda, SHERD_INLINE stands after the parameters.
#define SHERD_ALWAYS __attribute__((always_inline))

constexpr int turn = 2 * lanes;

// Both ways between consecutive elements and even ones beside odd ones.
#if defined(SHERD_ISA_avx512)
SHERD_INLINE Pair part(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(x.a, x.b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}
SHERD_INLINE Pair unpart(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          __builtin_shufflevector(x.a, x.b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE Pair part(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(x.a, x.b, 1, 3, 5, 7, 9, 11, 13, 15)};
}
SHERD_INLINE Pair unpart(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 8, 1, 9, 2, 10, 3, 11),
          __builtin_shufflevector(x.a, x.b, 4, 12, 5, 13, 6, 14, 7, 15)};
}
#else
SHERD_INLINE Pair part(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 2, 4, 6), __builtin_shufflevector(x.a, x.b, 1, 3, 5, 7)};
}
SHERD_INLINE Pair unpart(Pair x) {
  return {__builtin_shufflevector(x.a, x.b, 0, 4, 1, 5), __builtin_shufflevector(x.a, x.b, 2, 6, 3, 7)};
}
#endif

/// A stream that is only read.
template <bool split, class S>
SHERD_INLINE Pair read(const S* from) {
  if constexpr (split && !same_type<S, Bf16>)
    return part(load_pair<false>(from));
  else
    return load_pair<split>(from);
}

/// 2·lanes 16-bit results, past the caches where `stream` says so.
SHERD_INLINE void write_halves(std::uint16_t* to, U value, bool stream) {
  if (!stream) return store_as(to, value);
#if defined(SHERD_ISA_avx512)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(SHERD_ISA_avx2)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#endif
}

/// The upper halves of both registers in the order of the elements.
template <bool split>
SHERD_INLINE U join_upper(U a, U b) {
  return split ? (a >> 16) | (b & 0xffff0000u) : upper_halves(a, b);
}
template <bool split>
SHERD_INLINE U join_lower(U a, U b) {
  return split ? (a & 0xffffu) | (b << 16) : upper_halves(a << 16, b << 16);
}

SHERD_INLINE U sign_extend(H h) {
#if defined(SHERD_ISA_avx512)
  return (U)_mm512_maskz_cvtepi16_epi32(0xffff, (__m256i)h);  // see widen()
#else
  using S = std::int16_t __attribute__((vector_size(2 * lanes)));
  const I wide = __builtin_convertvector((S)h, I);
  return (U)wide;
#endif
}

/// Split masters: the bf16 parameter rounds to nearest with ties away from zero (base/dtype.h,
/// round_master_to_bf16), so it is the upper half of p + 0x8000, and p is it plus the low half as a signed
/// number.
template <bool split>
SHERD_INLINE Pair join_halves(const std::uint16_t* high, const std::uint16_t* low) {
  if constexpr (split) {
    const U h = load_as<U>(high), l = load_as<U>(low);
    return {(F)((h << 16) + (U)((I)(l << 16) >> 16)), (F)((h & 0xffff0000u) + (U)((I)l >> 16))};
  } else {
    const auto one = [&](int at) SHERD_ALWAYS {
      return (F)((widen(load_as<H>(high + at)) << 16) + sign_extend(load_as<H>(low + at)));
    };
    return {one(0), one(lanes)};
  }
}
template <bool split>
SHERD_INLINE void write_high(std::uint16_t* to, Pair p, bool stream) {
  write_halves(to, join_upper<split>((U)p.a + 0x8000u, (U)p.b + 0x8000u), stream);
}
template <bool split>
SHERD_INLINE void write_low(std::uint16_t* to, Pair p) {
  store_as(to, join_lower<split>((U)p.a, (U)p.b));
}

/// Stands for split masters where a parameter's storage type is asked for.
struct Split {};

template <bool split, class P>
SHERD_INLINE Pair read_master(const float* master, const void* param, const std::uint16_t* low) {
  if constexpr (same_type<P, Split>)
    return join_halves<split>(static_cast<const std::uint16_t*>(param), low);
  else
    return read<split>(master);
}

template <bool split, class P>
SHERD_INLINE void write_master(float* master, void* param, std::uint16_t* low, Pair p, bool stream) {
  if constexpr (same_type<P, Split>) {
    write_high<split>(static_cast<std::uint16_t*>(param), p, false);  // just read: the line is in the cache
    write_low<split>(low, p);
    return;
  }
  if constexpr (same_type<P, Bf16>) write_high<split>(static_cast<std::uint16_t*>(param), p, stream);
  if constexpr (!same_type<P, Split>) {
    const Pair consecutive = split ? unpart(p) : p;
    store_pair<false>(master, consecutive);
    if constexpr (same_type<P, F16>) store_pair<false>(static_cast<F16*>(param), consecutive);
  }
}

}  // namespace
}  // namespace sherd::optim::SHERD_ISA
