#include "tensor/formats/int8_blocks.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

namespace sherd::tensor {
namespace {

constexpr float least_scale = 0x1p-100f;
constexpr std::uint32_t kept_bits = ~std::uint32_t{0x7f};

/// One block of 64 values. False where one is not finite.
bool quantize_block(const float* values, std::byte* block) {
  std::uint32_t most = 0;  // bits of magnitudes are in the magnitudes' order, a NaN's above infinity's
  for (std::int64_t i = 0; i < int8_block; ++i)
    most = std::max(most, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  if (most >= 0x7f800000u) return false;
  const float quotient = std::bit_cast<float>(most) / 127.0f;
  float scale = std::bit_cast<float>(std::bit_cast<std::uint32_t>(quotient) & kept_bits);
  if (scale < least_scale) scale = 0;
  std::int8_t codes[int8_block] = {};
  for (std::int64_t i = 0; scale > 0 && i < int8_block; ++i)
    codes[i] = static_cast<std::int8_t>(std::nearbyint(values[i] / scale));
  std::memcpy(block, codes, sizeof codes);
  std::memcpy(block + int8_block, &scale, sizeof scale);
  return true;
}

}  // namespace

bool quantize_int8(std::span<const float> values, std::byte* blocks, Arena& arena) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::atomic<bool> finite = true;
  arena.parallel_for((count + int8_block - 1) / int8_block, 512, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      float padded[int8_block] = {};
      const float* from = values.data() + b * int8_block;
      const std::int64_t left = std::min(int8_block, count - b * int8_block);
      if (left < int8_block)
        from = static_cast<const float*>(
            std::memcpy(padded, from, static_cast<std::size_t>(left) * sizeof(float)));
      if (!quantize_block(from, blocks + b * int8_block_bytes)) finite = false;
    }
  });
  return finite;
}

void dequantize_int8(const std::byte* blocks, std::int64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size();) {
    const std::int64_t element = first + static_cast<std::int64_t>(i), in_block = element % int8_block;
    const std::byte* block = blocks + element / int8_block * int8_block_bytes;
    float scale;
    std::memcpy(&scale, block + int8_block, sizeof scale);
    const auto count = std::min(values.size() - i, static_cast<std::size_t>(int8_block - in_block));
    for (std::size_t k = 0; k < count; ++k)
      values[i + k] = static_cast<float>(std::to_integer<std::int8_t>(block[in_block + k])) * scale;
    i += count;
  }
}

}  // namespace sherd::tensor
