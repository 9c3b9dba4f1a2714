#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/arena.h"
#include "base/choices.h"
#include "tensor/formats/stored_code.h"

// Weights in few bits. A stored format cuts consecutive elements into blocks of a fixed number of bytes, each
// of which can be read by itself; stored_code.h lays them out. With a for the largest magnitude of a block:
//
//   bf16    numbers rounded to nearest, ties to even
//   int8    scale = a/127 in fp32, its seven lowest bits cleared, 0 below 2⁻¹⁰⁰; code = x/scale to nearest,
//           ties to even, -127 to 127 (Dettmers et al., "LLM.int8()", 2022, §2, in blocks)
//   nf4, fp4
//           scale = a, 0 below 2⁻¹²⁰; code = the one whose value lies nearest to x·(1/scale), of two as near
//           the lower value's (Dettmers et al., "QLoRA", 2023, §3)
//   nf4_double, fp4_double
//           likewise, and scales are kept in 8 bits: offset = their mean, up to the last that is not 0;
//           scale of the scales = the largest |scale - offset|; code = the nearest value of the dynamic map
//           with signs (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022, §2).
//           bitsandbytes takes the mean over the whole tensor, where this one takes that of 256 blocks: so
//           any part of a tensor can be read, and its scales lie closer together
//   mxfp4   scale = 2^(⌊log₂ a⌋ - 2), at least 2⁻¹²⁴; code = x/scale to nearest, ties to even, at most 6
//   fp8     scale and codes as fp8_code.h has them
//
// A value is the product of a code's value and its scale, rounded to fp32 (of int8, mxfp4 and fp8 it is
// exact), and then to the type in which it is asked for. Quantising values, in fp32, gives blocks of
// the same values again, but for double ones, whose scales then are rounded once more.

namespace sherd::tensor {

/// "nf4"; of StoredFormat::compute "compute".
std::string_view name_of(StoredFormat format);
/// The format of that name; nothing where there is none.
std::optional<StoredFormat> parse_stored_format(std::string_view name);

/// Elements of a block, and its bytes.
struct BlockSize {
  std::int64_t elements, bytes;
};
/// The block size of a format other than `compute`.
BlockSize block_size(StoredFormat format);

/// Bytes of the blocks of so many elements, the last of which may be shorter and is filled up with zeros.
inline std::int64_t stored_bytes(StoredFormat format, std::int64_t elements) {
  const BlockSize size = block_size(format);
  return (elements + size.elements - 1) / size.elements * size.bytes;
}

/// The blocks of `values` into stored_bytes() of `blocks`. False where a value is infinite or a NaN. The same
/// bits with any threads.
bool quantize(StoredFormat format, std::span<const float> values, std::byte* blocks, Arena& arena);

/// The values of elements `first` to first + values.size() - 1 of blocks.
void dequantize(StoredFormat format, const std::byte* blocks, std::int64_t first, std::span<float> values);

/// Makes of values those that their blocks hold. False, and they stay, as quantize() says.
bool round_to_format(StoredFormat format, std::span<float> values, Arena& arena);

/// The values of the 8-bit codes of double blocks' scales: the dynamic map with signs, as bitsandbytes has
/// it.
std::span<const float, 256> scale_values();

/// The scales, in fp32, of some of the 256 blocks of a double one, from block `first` on.
void double_scales_of(const std::byte* block, std::int64_t first, std::span<float> scales);

}  // namespace sherd::tensor
