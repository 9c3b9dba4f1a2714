#pragma once

#include "optim/isa/tables.h"
#include "tensor/cpu/isa/philox.h"

// The random bits with which bf16 moments are rounded.

namespace sherd::optim::SHERD_ISA {
namespace {

using namespace sherd::tensor::cpu::SHERD_ISA;

using W = std::uint16_t __attribute__((vector_size(4 * lanes)));

/// Sixteen random bits per element and moment, for a tile of 64 by 64 elements: the sum modulo 2^16 of a
/// number drawn for the row and one drawn for the column. Every sum is uniform and any two are independent,
/// which is all that unbiased rounding and the variance of its errors ask for, at a 32nd of the draws. See
/// optim/update_rule.h for where the bits come from.
struct Noise {
  static constexpr int side = 64, tile = side * side;
  alignas(64) std::uint16_t columns[2][side + 2 * lanes];  // a tail may read past the end
  alignas(64) std::uint16_t rows[2][side];

  SHERD_INLINE void draw(const RoundKeys& keys, std::uint64_t stream, std::uint64_t tile_index) {
    draw(keys, stream, 2 * tile_index, columns[0], columns[1]);
    draw(keys, stream, 2 * tile_index + 1, rows[0], rows[1]);
  }

 private:
  // 64 numbers for each moment out of 16 blocks, so laid out that nothing is shuffled.
  SHERD_INLINE static void draw(const RoundKeys& keys, std::uint64_t stream, std::uint64_t index,
                                std::uint16_t* first, std::uint16_t* second) {
    const std::uint64_t block = index * (side / 4);
    U lane;
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) lane[i] = static_cast<std::uint32_t>(i);
    for (int at = 0; at < side / 4; at += lanes) {
      U words[4];
      const U low = lane + (static_cast<std::uint32_t>(block) + static_cast<std::uint32_t>(at));
      philox_blocks(keys, stream, low, all(static_cast<std::uint32_t>(block >> 32)), words);
      store_as(first + 2 * at, words[0]), store_as(first + 2 * at + 32, words[1]);
      store_as(second + 2 * at, words[2]), store_as(second + 2 * at + 32, words[3]);
    }
  }
};

/// Where in a tile's noise a turn's first element stands; null unless the moments are rounded.
struct NoiseAt {
  const Noise* noise = nullptr;
  std::int64_t row = 0, column = 0;

  SHERD_INLINE NoiseAt right(std::int64_t by) const { return {noise, row, column + by}; }
  SHERD_INLINE U bits(int moment) const {
    return (U)(load_as<W>(noise->columns[moment] + column) + (noise->rows[moment][row] - W{}));
  }
};

/// Adds 16 random bits below the bf16 of each element and cuts: away from zero with a chance of exactly the
/// part cut off. Finite values above the largest bf16 may become infinite. The pair is even and odd elements.
SHERD_INLINE void write_rounded(Bf16* to, Pair x, U random) {
  const U a = (U)x.a + (random & 0xffffu), b = (U)x.b + (random >> 16);
  store_as(to, (a >> 16) | (b & 0xffff0000u));
}

}  // namespace
}  // namespace sherd::optim::SHERD_ISA
