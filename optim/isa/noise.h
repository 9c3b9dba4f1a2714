#pragma once

#include "optim/isa/tables.h"
#include "tensor/cpu/isa/philox.h"

// The random bits with which bf16 moments are rounded.

namespace sherd::optim::SHERD_ISA {
namespace {

using namespace sherd::tensor::cpu::SHERD_ISA;

/// Sixteen random bits per element and moment for 64 elements, out of 16 blocks of the Philox stream: word k
/// of block 16·group + b holds, lower half first, the bits of elements 32·(k mod 2) + 2b and the next, of
/// moment k/2. So a register of words covers a stretch of one moment, and nothing is shuffled.
struct Noise {
  static constexpr int group = 64;
  alignas(64) std::uint16_t bits[2][group + 2 * lanes];  // the last turn of a group may read past its end

  SHERD_INLINE void draw(const Chunk& c, std::uint64_t index) {
    const std::uint64_t first = index * (group / 4);
    U lane;
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) lane[i] = static_cast<std::uint32_t>(i);
#pragma GCC unroll 4
    for (int at = 0; at < group / 4; at += lanes) {
      U words[4];
      const U low = lane + (static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(at));
      philox_blocks(c.noise_seed, c.noise_stream, low, all(static_cast<std::uint32_t>(first >> 32)), words);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) store_as(bits[k / 2] + k % 2 * 32 + 2 * at, words[k]);
    }
  }
};

/// Adds `bits` below the bf16 of each element and cuts: up with a chance of exactly the part cut off
/// (stochastic rounding: Croci et al., "Stochastic rounding: implementation, error analysis and
/// applications", 2022). Finite values above the largest bf16 may become infinite. The pair is even and odd
/// elements.
SHERD_INLINE void write_rounded(Bf16* to, Pair x, const std::uint16_t* bits) {
  const U random = load_as<U>(bits);
  const U a = (U)x.a + (random & 0xffffu), b = (U)x.b + (random >> 16);
  store_as(to, (a >> 16) | (b & 0xffff0000u));
}

}  // namespace
}  // namespace sherd::optim::SHERD_ISA
