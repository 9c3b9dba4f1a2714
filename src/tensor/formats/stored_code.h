#pragma once

#include <cstdint>

// Sizes and tables of formats in which weights are stored (tensor/formats/stored_format.h). It is included
// where only plain declarations are allowed (tensor/cpu/isa/tables.h).
namespace sherd::tensor {

// A block in memory and in files; scales are fp32 where nothing else is said.
//   bf16    64 numbers
//   int8    64 codes, int8; a scale
//   nf4, fp4
//           64 codes, two in a byte, the first one in its upper half; a scale
//   nf4_double, fp4_double
//           the codes of 256 such blocks; 256 codes of their scales; the scale and the offset of these
//   mxfp4   32 codes, two in a byte, the first one in its lower half; the exponent of a scale, and 127
//   fp8     128 codes; a scale
inline constexpr std::int64_t bf16_block = 64, bf16_block_bytes = 128;
inline constexpr std::int64_t int8_block = 64, int8_block_bytes = 68;
inline constexpr std::int64_t four_bit_block = 64, four_bit_codes = 32, four_bit_block_bytes = 36;
inline constexpr std::int64_t double_scales = 256, double_block = double_scales * four_bit_block,
                              double_codes = double_scales * four_bit_codes,
                              double_block_bytes = double_codes + double_scales + 8;
inline constexpr std::int64_t mxfp4_block = 32, mxfp4_codes = 16, mxfp4_block_bytes = 17;
inline constexpr std::int64_t stored_fp8_block = 128, stored_fp8_block_bytes = 132;

// The values of codes, over the scale of their block; those of nf4 and fp4 are bitsandbytes'.
inline constexpr float nf4_values[16] = {-1.0f,
                                         -0.6961928009986877f,
                                         -0.5250730514526367f,
                                         -0.39491748809814453f,
                                         -0.28444138169288635f,
                                         -0.18477343022823334f,
                                         -0.09105003625154495f,
                                         0.0f,
                                         0.07958029955625534f,
                                         0.16093020141124725f,
                                         0.24611230194568634f,
                                         0.33791524171829224f,
                                         0.44070982933044434f,
                                         0.5626170039176941f,
                                         0.7229568362236023f,
                                         1.0f};
inline constexpr float fp4_values[16] = {
    0.0f, 0.0625f / 12,    8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
    0.0f, -(0.0625f / 12), -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
inline constexpr float mxfp4_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace sherd::tensor
