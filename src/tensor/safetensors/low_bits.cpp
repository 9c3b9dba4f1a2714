#include "tensor/safetensors/low_bits.h"

#include <cmath>
#include <limits>

#include "base/error.h"

namespace sherd::tensor {

void decode_mxfp4(std::span<const std::byte> blocks, std::span<const std::byte> scales, std::int64_t first,
                  std::span<float> to) {
  static constexpr float values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  const std::int64_t skipped = first / mxfp4_block * mxfp4_block;
  require((first - skipped + std::ssize(to) + mxfp4_block - 1) / mxfp4_block <= std::ssize(scales) &&
              std::ssize(blocks) >= std::ssize(scales) * mxfp4_block_bytes,
          "decode_mxfp4: ", blocks.size(), " bytes and ", scales.size(), " scales do not hold ", to.size(),
          " numbers");
  for (std::size_t i = 0; i < to.size(); ++i) {
    const auto at = static_cast<std::size_t>(first - skipped) + i;
    const auto byte = std::to_integer<unsigned>(blocks[at / 2]);
    const auto scale = std::to_integer<int>(scales[at / mxfp4_block]);
    const float power =
        scale == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, scale - 127);
    to[i] = values[at % 2 == 0 ? byte & 15 : byte >> 4] * power;
  }
}

void decode_e4m3(std::span<const std::byte> codes, std::span<float> to) {
  require(codes.size() == to.size(), "decode_e4m3: ", codes.size(), " codes for ", to.size(), " numbers");
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const auto code = std::to_integer<int>(codes[i]);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                            : exponent == 15 && mantissa == 7
                                ? std::numeric_limits<float>::quiet_NaN()
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    to[i] = code & 128 ? -magnitude : magnitude;
  }
}

}  // namespace sherd::tensor
