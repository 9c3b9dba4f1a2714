#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "models/compressed/scheme.h"

namespace sherd::models {

/// A matrix [rows, columns] in such a form, its rows being outputs. In memory each code has a byte of its
/// own.
struct CompressedMatrix {
  std::int64_t rows = 0, columns = 0;
  std::int64_t group = 0;             ///< columns that share a scale; divides `columns`
  std::vector<std::uint8_t> codes{};  ///< [rows, columns]: int8's and int4's in two's complement, E4M3's bits
  std::vector<float> scales{};        ///< [rows, columns / group], numbers of the scheme's dtype
  float input_scale = 0;              ///< where inputs have one scale

  std::int64_t groups() const { return columns / group; }
};

/// The scale of weights, or inputs, whose largest magnitude this is: that over half the codes' range (127.5,
/// 448, 7.5), in the scheme's dtype; of zeros that dtype's epsilon. (compressed-tensors' min-max rule.)
float compressed_scale(const CompressedScheme& scheme, float largest);
/// The code of a finite number: that over the scale, rounded to nearest, ties to even, and clamped.
std::uint8_t compressed_code(CompressedKind kind, float value, float scale);
/// The number that a code stands for, over its scale.
float compressed_value(CompressedKind kind, std::uint8_t code);

/// Rounds a matrix to nearest. Throws Error{data} naming it where a value is not finite, Error{config} where
/// groups do not divide its columns.
CompressedMatrix round_to_nearest(const CompressedScheme& scheme, const std::string& name,
                                  std::span<const float> values, std::int64_t rows, std::int64_t columns);
/// Throws as round_to_nearest() does.
void require_compressible(const CompressedScheme& scheme, const std::string& name,
                          std::span<const float> values, std::int64_t columns);
/// The numbers that the matrix stands for, [rows, columns], in fp32.
void decompress(CompressedKind kind, const CompressedMatrix& matrix, std::span<float> to);
/// Rounds the inputs of a layer, rows of `columns` elements, as servers do: by `input_scale`, or where that
/// is 0 each row by a scale of its own.
void round_inputs(const CompressedScheme& scheme, float input_scale, std::span<float> rows,
                  std::int64_t columns);

/// 4-bit codes as compressed-tensors packs them: eight to an int32 of a row, the first in the lowest bits,
/// each plus 8. [rows, ⌈columns / 8⌉] int32 in the machine's (little-endian) bytes.
std::vector<std::byte> pack_int4(const CompressedMatrix& matrix);
/// Code `column` of a row packed so.
inline std::uint8_t unpack_int4(std::byte pair, std::int64_t column) {
  const auto nibble = static_cast<int>(std::to_integer<unsigned>(pair) >> (column % 2 == 0 ? 0 : 4) & 15U);
  return static_cast<std::uint8_t>(nibble - 8);
}

}  // namespace sherd::models
