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

/// Half of the lanes, one block per 64 bits. Only the lower half of each counter means anything, as the
/// multiplications read no more.
struct PhiloxCounters {
  Q c0, c1, c2, c3;

  SHERD_INLINE void round(Q k0, Q k1) {
    const Q p0 = multiply_even((U)c0, all(0xD2511F53u)), p1 = multiply_even((U)c2, all(0xCD9E8D57u));
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c3 = p0;
  }
};

/// The key of each round, kept in memory where each round's sum can pick its own up.
struct RoundKeys {
  std::uint64_t even[10], odd[10];
  SHERD_INLINE explicit RoundKeys(std::uint64_t seed) {
    std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
      even[round] = k0, odd[round] = k1;
  }
};

/// Lane by lane, the four words of the block whose index is low + 2^32·high.
SHERD_INLINE void philox_blocks(const RoundKeys& keys, std::uint64_t stream, U low, U high, U (&words)[4]) {
  const Q stream0 = stream - Q{}, stream1 = (stream >> 32) - Q{};
  PhiloxCounters even{(Q)low, (Q)high, stream0, stream1}, odd{(Q)low >> 32, (Q)high >> 32, stream0, stream1};
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    even.round(keys.even[round] - Q{}, keys.odd[round] - Q{});
    odd.round(keys.even[round] - Q{}, keys.odd[round] - Q{});
  }
  const auto join = [](Q a, Q b) __attribute__((always_inline)) {
    return (U)((a & 0xffffffffull) | (b << 32));
  };
  words[0] = join(even.c0, odd.c0), words[1] = join(even.c1, odd.c1);
  words[2] = join(even.c2, odd.c2), words[3] = join(even.c3, odd.c3);
}
SHERD_INLINE void philox_blocks(std::uint64_t seed, std::uint64_t stream, U low, U high, U (&words)[4]) {
  philox_blocks(RoundKeys(seed), stream, low, high, words);
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
