#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/arena.h"

// Weights in 8 bits: block-wise linear quantisation by the largest magnitude (Dettmers et al., "LLM.int8()",
// 2022, §2, per block as in "8-bit optimizers via block-wise quantization", 2022). Of a block of 64 elements
// x with the largest magnitude a,
//
//   scale = a/127 in fp32, its seven lowest bits cleared; 0 where that is below 2⁻¹⁰⁰
//   code = x/scale in fp32, rounded to nearest, ties to even: -127 to 127; 0 where the scale is 0
//   value = code·scale
//
// A scale has 17 significant bits, so that all values are exact in fp32, the largest keeps the code ±127, and
// values quantise to the codes and scales that they come from.
//
// In memory and in files a block is its 64 codes, int8, and its scale, fp32, behind them.

namespace sherd::tensor {

inline constexpr std::int64_t int8_block = 64, int8_block_bytes = int8_block + 4;

/// Bytes of the blocks of so many elements, the last of which may be shorter and is filled up with zeros.
constexpr std::int64_t int8_bytes(std::int64_t elements) {
  return (elements + int8_block - 1) / int8_block * int8_block_bytes;
}

/// The blocks of `values` into int8_bytes() of `blocks`. False where a value is infinite or a NaN. The same
/// bits with any threads.
bool quantize_int8(std::span<const float> values, std::byte* blocks, Arena& arena);

/// The values of elements `first` to first + values.size() - 1 of blocks.
void dequantize_int8(const std::byte* blocks, std::int64_t first, std::span<float> values);

}  // namespace sherd::tensor
