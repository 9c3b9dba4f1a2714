#pragma once

#include <cstdint>
#include <span>

#include "base/arena.h"
#include "base/cpu_isa.h"

// Moments in 8 bits: block-wise dynamic quantisation (Dettmers et al., "8-bit optimizers via block-wise
// quantization", 2022, §2), with the codes of bitsandbytes. Elements of a block share one fp32 scale, the
// largest magnitude among them; a code names a value of the dynamic map, which is multiplied by it.
//
// The map has seven decades below 1, 10⁻⁶ to 1. The d-th (0 to 6) is divided into 2^d equal parts where
// there are signs, 2^(d+1) where there are none, and has a value in the middle of each; 0 and 1 are values,
// too, -1 is not. Codes count values from the lowest.

namespace sherd::optim {

/// Elements that share a scale, counted from the beginning of a parameter, or of the slice that a rank holds;
/// its last block may be shorter.
inline constexpr std::int64_t quantized_block = 256;

/// How a state is kept.
enum class Code : std::uint8_t {
  none,          ///< as numbers of a floating dtype
  signed_8bit,   ///< by the map with signs, zero in the middle
  unsigned_8bit  ///< by the map of numbers of 0 and more
};

/// The code of 0.
std::uint8_t zero_code(Code code);

/// The codes whose values lie nearest to elements divided by the scales of their blocks, and these: one for
/// each block, the first of which begins with the first element. Where there are no signs, a quotient above 0
/// takes the code of 0 in no case, but the one above it: a second moment of 0 beside a first moment that is
/// none would leave a step without a bound. Below 2⁻¹²⁰ a scale is 0, and so are the elements. The same bits
/// with any threads and instruction set.
void quantize(Code code, std::span<const float> values, std::uint8_t* codes, float* scales, Arena& arena,
              CpuIsa isa = cpu_isa());

/// The values that codes stand for, for those who keep them in fp32: quantize() makes the same codes and
/// scales of them again. That is why the lowest code of signed numbers gives -1 times the scale, which only
/// numbers next to the largest magnitude have, and not the map's -0.993.
/// `skipped`: elements of the first block that come before the first one, less than a block.
void dequantize(Code code, std::span<const std::uint8_t> codes, std::int64_t skipped, const float* scales,
                float* values, Arena& arena);

}  // namespace sherd::optim
