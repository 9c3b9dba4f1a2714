#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace sherd::models {

/// Types of a GGUF file's values, by the numbers that files have for them.
enum class GgufType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,   ///< 32 values: codes of 4 bits and a scale
  q8_0 = 8,   ///< 32 values: codes of 8 bits and a scale
  q4_k = 12,  ///< 8 parts of 32 values: codes of 4 bits; of each part 6 bits of a scale and of a least value
  q6_k = 14,  ///< 16 parts of 16 values: codes of 6 bits; of each part 8 bits of a scale
  bf16 = 30
};

/// "f32", "q4_k".
std::string_view name_of(GgufType type);
/// Inverse of name_of().
std::optional<GgufType> parse_gguf_type(std::string_view name);

/// Values of a block, and its bytes.
std::int64_t values_of_block(GgufType type);
std::int64_t bytes_of_block(GgufType type);
/// Bytes of a row of so many values. Throws Error{usage} where these are no whole number of blocks.
std::uint64_t bytes_of_row(GgufType type, std::int64_t columns);

/// Encodes whole blocks of finite values, each by itself: f16 and bf16 to nearest, q8_0 and q4_0 as ggml's
/// reference does to the bit; q4_k and q6_k search for the scales whose squared error, weighted towards large
/// values, is least. The same values give the same bytes on every machine.
void encode_gguf(GgufType type, std::span<const float> values, std::span<std::byte> to);

}  // namespace sherd::models
