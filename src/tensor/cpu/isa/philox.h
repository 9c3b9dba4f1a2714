#pragma once

#include "tensor/cpu/isa/vec.h"

// Philox4x32-10 in lanes; the same words as base/random.h's philox().

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

using Q = std::uint64_t __attribute__((vector_size(4 * lanes)));

// Products of the even 32-bit lanes.
#if defined(SHERD_ISA_avx512)
// Written with a full mask because GCC 12 warns about the uninitialised operand inside the plain intrinsic.
SHERD_INLINE Q multiply_even(U a, U b) {
  return (Q)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE Q multiply_even(U a, U b) {
  return (Q)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
#else
SHERD_INLINE Q multiply_even(U a, U b) {
  return (Q)_mm_mul_epu32((__m128i)a, (__m128i)b);
}
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

/// Lane by lane, the four words of the block whose index is low + 2^32·high.
SHERD_INLINE void philox_blocks(std::uint64_t seed, std::uint64_t stream, U low, U high, U (&words)[4]) {
  U c0 = low, c1 = high;
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
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
