#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/formats/stored_code.h"

namespace sherd::tensor {

// Numbers that published files hold in fewer bits than they are computed with.

// MXFP4 (OCP Microscaling Formats 1.0), in which GPT-OSS is published: blocks of 32 numbers of 4 bits (E2M1),
// two to a byte, the even one in its low half, and a byte for each block, by whose power of two, of scale -
// 127, they are multiplied; 255 is no number. bf16 holds every value but the smallest.

/// Values [first, first + to.size()) of those whose blocks and scales begin with block first / 32.
void decode_mxfp4(std::span<const std::byte> blocks, std::span<const std::byte> scales, std::int64_t first,
                  std::span<float> to);

/// FP8 (E4M3), of which DeepSeek-V3's files have a matrix and a factor of each square of 128 x 128 elements,
/// WEIGHT_scale_inv.
inline constexpr std::int64_t fp8_file_block = 128;
/// The numbers that such codes are.
void decode_e4m3(std::span<const std::byte> codes, std::span<float> to);

}  // namespace sherd::tensor
