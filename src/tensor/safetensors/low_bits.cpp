#include "tensor/safetensors/low_bits.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/fp8_number.h"

namespace sherd::tensor {
namespace {

float e8m0_value(int code) {
  return code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
}

float e4m3_value(int code) {
  return fp8_decode<Fp8Format::e4m3, Fp8Number>(static_cast<std::uint32_t>(code));
}

std::array<float, 256> every_code(float (*value)(int)) {
  std::array<float, 256> out;
  for (int code = 0; code < 256; ++code) out[static_cast<std::size_t>(code)] = value(code);
  return out;
}

}  // namespace

void decode_mxfp4(std::span<const std::byte> blocks, std::span<const std::byte> scales, std::int64_t first,
                  std::span<float> to) {
  static const std::array<float, 256> powers = every_code(e8m0_value);
  const std::int64_t skipped = first / mxfp4_block * mxfp4_block;
  require((first - skipped + std::ssize(to) + mxfp4_block - 1) / mxfp4_block <= std::ssize(scales) &&
              std::ssize(blocks) >= std::ssize(scales) * mxfp4_codes,
          "decode_mxfp4: ", blocks.size(), " bytes and ", scales.size(), " scales do not hold ", to.size(),
          " numbers");
  for (std::size_t i = 0; i < to.size(); ++i) {
    const auto at = static_cast<std::size_t>(first - skipped) + i;
    const auto byte = std::to_integer<unsigned>(blocks[at / 2]);
    const auto scale = std::to_integer<std::size_t>(scales[at / mxfp4_block]);
    to[i] = mxfp4_values[at % 2 == 0 ? byte & 15 : byte >> 4] * powers[scale];
  }
}

void decode_e4m3(std::span<const std::byte> codes, std::span<float> to) {
  require(codes.size() == to.size(), "decode_e4m3: ", codes.size(), " codes for ", to.size(), " numbers");
  static const std::array<float, 256> values = every_code(e4m3_value);
  for (std::size_t i = 0; i < codes.size(); ++i) to[i] = values[std::to_integer<std::size_t>(codes[i])];
}

}  // namespace sherd::tensor
