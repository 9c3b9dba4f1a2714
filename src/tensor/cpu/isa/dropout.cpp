#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

using Q = std::uint64_t __attribute__((vector_size(4 * lanes)));

// Products of the even 32-bit lanes, and the interleavings within each 128 bits.
#if defined(SHERD_ISA_avx512)
// Written with full masks because GCC 12 warns about the uninitialised operand inside the plain intrinsics.
SHERD_INLINE Q multiply_even(U a, U b) { return (Q)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b); }
SHERD_INLINE U low_pairs(U a, U b) { return (U)_mm512_maskz_unpacklo_epi32(0xffff, (__m512i)a, (__m512i)b); }
SHERD_INLINE U high_pairs(U a, U b) { return (U)_mm512_maskz_unpackhi_epi32(0xffff, (__m512i)a, (__m512i)b); }
SHERD_INLINE U low_halves(U a, U b) { return (U)_mm512_maskz_unpacklo_epi64(0xff, (__m512i)a, (__m512i)b); }
SHERD_INLINE U high_halves(U a, U b) { return (U)_mm512_maskz_unpackhi_epi64(0xff, (__m512i)a, (__m512i)b); }
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE Q multiply_even(U a, U b) { return (Q)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
SHERD_INLINE U low_pairs(U a, U b) { return (U)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
SHERD_INLINE U high_pairs(U a, U b) { return (U)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
SHERD_INLINE U low_halves(U a, U b) { return (U)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
SHERD_INLINE U high_halves(U a, U b) { return (U)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
SHERD_INLINE Q multiply_even(U a, U b) { return (Q)_mm_mul_epu32((__m128i)a, (__m128i)b); }
SHERD_INLINE U low_pairs(U a, U b) { return (U)_mm_unpacklo_epi32((__m128i)a, (__m128i)b); }
SHERD_INLINE U high_pairs(U a, U b) { return (U)_mm_unpackhi_epi32((__m128i)a, (__m128i)b); }
SHERD_INLINE U low_halves(U a, U b) { return (U)_mm_unpacklo_epi64((__m128i)a, (__m128i)b); }
SHERD_INLINE U high_halves(U a, U b) { return (U)_mm_unpackhi_epi64((__m128i)a, (__m128i)b); }
#endif

struct Product {
  U high, low;
};
SHERD_INLINE Product multiply(U a, U b) {
  const Q even = multiply_even(a, b);
  const Q odd = multiply_even((U)((Q)a >> 32), b);
  constexpr std::uint64_t lower = 0xffffffffull;
  return {(U)((even >> 32) | (odd & ~lower)), (U)((even & lower) | (odd << 32))};
}

/// base/random.h's philox() for blocks index … index + lanes - 1: words[k] holds stream elements 4·index + k·lanes
/// and following, one per lane.
SHERD_INLINE void philox(std::uint64_t seed, std::uint64_t stream, std::uint64_t index, U (&words)[4]) {
  // Lane 4q + k computes the block that the transposition at the end moves to 128-bit part q of words[k].
  U offset;
#pragma GCC unroll 16
  for (int lane = 0; lane < lanes; ++lane)
    offset[lane] = static_cast<std::uint32_t>(lane % 4 * (lanes / 4) + lane / 4);
  U c0 = offset + static_cast<std::uint32_t>(index);
  U c1 = all(static_cast<std::uint32_t>(index >> 32)) - (U)(c0 < offset);
  U c2 = all(static_cast<std::uint32_t>(stream)), c3 = all(static_cast<std::uint32_t>(stream >> 32));
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Product p0 = multiply(c0, all(0xD2511F53u)), p1 = multiply(c2, all(0xCD9E8D57u));
    c0 = p1.high ^ c1 ^ k0;
    c1 = p1.low;
    c2 = p0.high ^ c3 ^ k1;
    c3 = p0.low;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const U low01 = low_pairs(c0, c1), high01 = high_pairs(c0, c1);
  const U low23 = low_pairs(c2, c3), high23 = high_pairs(c2, c3);
  words[0] = low_halves(low01, low23);
  words[1] = high_halves(low01, low23);
  words[2] = low_halves(high01, high23);
  words[3] = high_halves(high01, high23);
}

template <class S>
struct Loops {
  template <bool with_residual>
  static void run(const S* x, const S* residual, S* out, Count n, std::uint64_t first, std::uint64_t seed,
                  std::uint64_t stream, std::uint32_t threshold, float factor) {
    const auto step = [=](U word, F u, F r) {
      const F kept = (I)(word >> 8) >= (I)all(threshold) ? u * factor : F{};
      return with_residual ? r + kept : kept;
    };
    U words[4];
    Count i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      philox(seed, stream, (first + static_cast<std::uint64_t>(i)) / 4, words);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const Count at = i + k * lanes;
        store(out + at, step(words[k], load(x + at), with_residual ? load(residual + at) : F{}));
      }
    }
    if (i == n) return;
    philox(seed, stream, (first + static_cast<std::uint64_t>(i)) / 4, words);
    for (int k = 0; k < 4 && i < n; ++k, i += lanes) {
      const Count count = n - i < lanes ? n - i : lanes;
      const F r = with_residual ? load_tail(residual + i, count) : F{};
      store_tail(out + i, step(words[k], load_tail(x + i, count), r), count);
    }
  }

  static void dropout(const void* x, const void* residual, void* out, Count n, std::uint64_t first,
                      std::uint64_t seed, std::uint64_t stream, std::uint32_t threshold, float factor) {
    const S* from = static_cast<const S*>(x);
    S* to = static_cast<S*>(out);
    if (residual)
      run<true>(from, static_cast<const S*>(residual), to, n, first, seed, stream, threshold, factor);
    else
      run<false>(from, nullptr, to, n, first, seed, stream, threshold, factor);
  }
};

}  // namespace

const DropoutOps dropout[storage_count] = {
    {Loops<float>::dropout}, {Loops<Bf16>::dropout}, {Loops<F16>::dropout}};

}  // namespace sherd::tensor::cpu::SHERD_ISA
