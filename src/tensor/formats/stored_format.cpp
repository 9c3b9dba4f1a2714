#include "tensor/formats/stored_format.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "tensor/formats/four_bits.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/fp8_number.h"

namespace sherd::tensor {
namespace {

constexpr std::array<std::string_view, stored_formats> names{
    "compute", "bf16", "int8", "nf4", "fp4", "nf4_double", "fp4_double", "mxfp4", "fp8"};

/// Magnitudes' bits are in the magnitudes' order, a NaN's above infinity's.
std::uint32_t largest_bits(const float* values, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i)
    most = std::max(most, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  return most;
}

template <class T>
void put(std::byte* to, const T& value) {
  std::memcpy(to, &value, sizeof value);
}
template <class T>
T get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Each of these has the block of one format: from numbers that are finite, `largest` being the bits of the
// largest magnitude, and back.

struct Bf16Block {
  static constexpr BlockSize size{bf16_block, bf16_block_bytes};
  static void quantize(const float* values, std::uint32_t, std::byte* block) {
    for (std::int64_t i = 0; i < bf16_block; ++i) put(block + 2 * i, bf16(values[i]));
  }
  static void dequantize(const std::byte* block, float* values) {
    for (std::int64_t i = 0; i < bf16_block; ++i) values[i] = static_cast<float>(get<bf16>(block + 2 * i));
  }
};

struct Int8Block {
  static constexpr BlockSize size{int8_block, int8_block_bytes};
  static constexpr float least_scale = 0x1p-100f;
  static void quantize(const float* values, std::uint32_t largest, std::byte* block) {
    const float quotient = std::bit_cast<float>(largest) / 127.0f;
    float scale = std::bit_cast<float>(std::bit_cast<std::uint32_t>(quotient) & ~std::uint32_t{0x7f});
    if (scale < least_scale) scale = 0;
    for (std::int64_t i = 0; i < int8_block; ++i)
      block[i] = std::byte(
          scale > 0 ? static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(values[i] / scale)))
                    : 0);
    put(block + int8_block, scale);
  }
  static void dequantize(const std::byte* block, float* values) {
    const auto scale = get<float>(block + int8_block);
    for (std::int64_t i = 0; i < int8_block; ++i)
      values[i] = static_cast<float>(std::to_integer<std::int8_t>(block[i])) * scale;
  }
};

struct Mxfp4Block {
  static constexpr BlockSize size{mxfp4_block, mxfp4_block_bytes};
  static constexpr int least_exponent = 3;  // half of that scale is a normal number
  static std::uint8_t code(float x) {
    const float m = std::abs(x);
    const int code =
        (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return static_cast<std::uint8_t>(code | (std::signbit(x) ? 8 : 0));
  }
  static void quantize(const float* values, std::uint32_t largest, std::byte* block) {
    const int exponent = std::max(least_exponent, static_cast<int>(largest >> 23) - 2);
    const float inverse = std::ldexp(1.0f, 127 - exponent);
    for (std::int64_t i = 0; i < mxfp4_codes; ++i)
      block[i] = std::byte(code(values[2 * i] * inverse) | code(values[2 * i + 1] * inverse) << 4);
    block[mxfp4_codes] = std::byte(exponent);
  }
  static void dequantize(const std::byte* block, float* values) {
    const float scale = std::bit_cast<float>(std::to_integer<std::uint32_t>(block[mxfp4_codes]) << 23);
    for (std::int64_t i = 0; i < mxfp4_codes; ++i) {
      const auto codes = std::to_integer<std::uint32_t>(block[i]);
      values[2 * i] = mxfp4_values[codes & 15u] * scale, values[2 * i + 1] = mxfp4_values[codes >> 4] * scale;
    }
  }
};

struct Fp8Block {
  static constexpr BlockSize size{stored_fp8_block, stored_fp8_block_bytes};
  static void quantize(const float* values, std::uint32_t largest, std::byte* block) {
    const std::uint32_t scale = fp8_scale_bits(Fp8Format::e4m3, largest);
    const float inverse = std::bit_cast<float>(fp8_inverse_bits(scale));
    for (std::int64_t i = 0; i < stored_fp8_block; ++i)
      block[i] = std::byte(fp8_encode<Fp8Format::e4m3, Fp8Number>(values[i], inverse));
    put(block + stored_fp8_block, scale);
  }
  static void dequantize(const std::byte* block, float* values) {
    const auto scale = get<float>(block + stored_fp8_block);
    for (std::int64_t i = 0; i < stored_fp8_block; ++i)
      values[i] = fp8_decode<Fp8Format::e4m3, Fp8Number>(std::to_integer<std::uint32_t>(block[i])) * scale;
  }
};

template <FourBits kind>
struct FourBitBlock {
  static constexpr BlockSize size{four_bit_block, four_bit_block_bytes};
  static void quantize(const float* values, std::uint32_t largest, std::byte* block) {
    put(block + four_bit_codes, four_bits(kind, values, std::bit_cast<float>(largest), block));
  }
  static void dequantize(const std::byte* block, float* values) {
    from_four_bits(kind, block, get<float>(block + four_bit_codes), values);
  }
};

template <FourBits kind>
struct DoubleBlock {
  static constexpr BlockSize size{double_block, double_block_bytes};
  static void quantize(const float* values, std::uint32_t, std::byte* block) {
    std::array<float, double_scales> scales;
    for (std::size_t b = 0; b < scales.size(); ++b) {
      const float* from = values + b * four_bit_block;
      scales[b] = four_bits(kind, from, std::bit_cast<float>(largest_bits(from, four_bit_block)),
                            block + b * four_bit_codes);
    }
    quantize_scales(scales, block + double_codes);
  }
  static void dequantize(const std::byte* block, float* values) {
    dequantize(block, 0, double_block, values);
  }
  /// Elements [first, end) alone, to where they have their place in `values`, and those around them.
  static void dequantize(const std::byte* block, std::int64_t first, std::int64_t end, float* values) {
    std::array<float, double_scales> scales;
    double_scales_of(block, 0, scales);
    for (std::int64_t b = first / four_bit_block; b * four_bit_block < end; ++b)
      from_four_bits(kind, block + b * four_bit_codes, scales[static_cast<std::size_t>(b)],
                     values + b * four_bit_block);
  }
};

/// Calls visit(Block()) for the format's block.
template <class Visit>
auto with_block(StoredFormat format, const Visit& visit) {
  switch (format) {
    case StoredFormat::bf16:
      return visit(Bf16Block());
    case StoredFormat::int8:
      return visit(Int8Block());
    case StoredFormat::nf4:
      return visit(FourBitBlock<FourBits::nf4>());
    case StoredFormat::fp4:
      return visit(FourBitBlock<FourBits::fp4>());
    case StoredFormat::nf4_double:
      return visit(DoubleBlock<FourBits::nf4>());
    case StoredFormat::fp4_double:
      return visit(DoubleBlock<FourBits::fp4>());
    case StoredFormat::mxfp4:
      return visit(Mxfp4Block());
    case StoredFormat::fp8:
      return visit(Fp8Block());
    case StoredFormat::compute:
      break;
  }
  fail(ErrorKind::usage, "weights in the type that a run computes in have no blocks");
}

}  // namespace

std::string_view name_of(StoredFormat format) {
  return names[static_cast<std::size_t>(format)];
}

std::optional<StoredFormat> parse_stored_format(std::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<StoredFormat>(found - names.begin());
}

BlockSize block_size(StoredFormat format) {
  return with_block(format, [](auto block) { return decltype(block)::size; });
}

bool quantize(StoredFormat format, std::span<const float> values, std::byte* blocks, Arena& arena) {
  return with_block(format, [&](auto block) {
    using Block = decltype(block);
    constexpr auto in_block = Block::size.elements;
    constexpr std::int64_t grain = std::max<std::int64_t>(1, (std::int64_t{1} << 15) / in_block);
    const auto count = static_cast<std::int64_t>(values.size());
    std::atomic<bool> finite = true;
    arena.parallel_for((count + in_block - 1) / in_block, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> padded;
      for (std::int64_t b = begin; b < end; ++b) {
        const float* from = values.data() + b * in_block;
        if (const std::int64_t left = count - b * in_block; left < in_block) {
          padded.assign(from, from + left);
          padded.resize(static_cast<std::size_t>(in_block));
          from = padded.data();
        }
        const std::uint32_t largest = largest_bits(from, in_block);
        if (largest >= 0x7f800000u)
          finite = false;
        else
          Block::quantize(from, largest, blocks + b * Block::size.bytes);
      }
    });
    return finite.load();
  });
}

void dequantize(StoredFormat format, const std::byte* blocks, std::int64_t first, std::span<float> values) {
  with_block(format, [&](auto block) {
    using Block = decltype(block);
    constexpr std::int64_t in_block = Block::size.elements;
    std::vector<float> part;
    for (std::size_t i = 0; i < values.size();) {
      const std::int64_t element = first + static_cast<std::int64_t>(i), skipped = element % in_block;
      const std::byte* from = blocks + element / in_block * Block::size.bytes;
      const auto count = std::min(values.size() - i, static_cast<std::size_t>(in_block - skipped));
      if (count == static_cast<std::size_t>(in_block)) {
        Block::dequantize(from, values.data() + i);
      } else {
        part.resize(static_cast<std::size_t>(in_block));
        if constexpr (in_block == double_block)
          Block::dequantize(from, skipped, skipped + static_cast<std::int64_t>(count), part.data());
        else
          Block::dequantize(from, part.data());
        std::copy_n(part.begin() + skipped, count, values.begin() + static_cast<std::ptrdiff_t>(i));
      }
      i += count;
    }
  });
}

bool round_to_format(StoredFormat format, std::span<float> values, Arena& arena) {
  std::vector<std::byte> blocks(
      static_cast<std::size_t>(stored_bytes(format, static_cast<std::int64_t>(values.size()))));
  if (!quantize(format, values, blocks.data(), arena)) return false;
  dequantize(format, blocks.data(), 0, values);
  return true;
}

}  // namespace sherd::tensor
