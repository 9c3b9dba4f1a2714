#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/formats/stored_code.h"

// Blocks of nf4 and fp4 and their scales in 8 bits, for stored_format.cpp.
namespace sherd::tensor {

enum class FourBits : std::uint8_t { nf4, fp4 };

/// The codes of a block's 64 finite values, the largest magnitude of which is `largest`, into 32 bytes.
/// Returns the scale.
float four_bits(FourBits kind, const float* values, float largest, std::byte* codes);
void from_four_bits(FourBits kind, const std::byte* codes, float scale, float* values);

/// The codes of up to 256 scales, less `offset`, over the largest magnitude of what is left, which is
/// returned.
float scale_codes(std::span<const float> scales, float offset, std::byte* codes);
/// 256 codes, the scale of the scales and their offset, into 264 bytes.
void quantize_scales(const std::array<float, double_scales>& scales, std::byte* to);

}  // namespace sherd::tensor
