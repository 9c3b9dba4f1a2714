#include "models/compressed/matrix.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/fp8_number.h"

namespace sherd::models {
namespace {

constexpr std::array<std::pair<const char*, CompressedKind>, 3> kinds{
    {{"int8", CompressedKind::int8}, {"fp8", CompressedKind::fp8}, {"int4", CompressedKind::int4}}};

float half_range(CompressedKind kind) {
  return kind == CompressedKind::int8 ? 127.5f : kind == CompressedKind::fp8 ? 448.0f : 7.5f;
}

/// The number nearest to `value` that a dtype holds.
float rounded(float value, DType dtype) {
  if (dtype == DType::bf16) return static_cast<float>(bf16(value));
  if (dtype == DType::f16) return static_cast<float>(f16(value));
  return value;
}

float epsilon(DType dtype) {
  return dtype == DType::bf16  ? 0x1p-7f
         : dtype == DType::f16 ? 0x1p-10f
                               : std::numeric_limits<float>::epsilon();
}

float largest_of(std::span<const float> values) {
  float out = 0;
  for (const float value : values) out = std::max(out, std::abs(value));
  return out;
}

}  // namespace

std::optional<CompressedKind> parse_compressed_kind(std::string_view name) {
  for (const auto& [word, kind] : kinds)
    if (name == word) return kind;
  return std::nullopt;
}

const char* name_of(CompressedKind kind) {
  return kinds[static_cast<std::size_t>(kind)].first;
}

float compressed_scale(const CompressedScheme& scheme, float largest) {
  const float scale = rounded(largest / half_range(scheme.kind), scheme.scale_dtype);
  return scale == 0 ? epsilon(scheme.scale_dtype) : scale;
}

std::uint8_t compressed_code(CompressedKind kind, float value, float scale) {
  const float of_scale = value / scale;
  if (kind == CompressedKind::fp8)
    return static_cast<std::uint8_t>(tensor::fp8_encode<tensor::Fp8Format::e4m3, tensor::Fp8Number>(
        std::clamp(of_scale, -448.0f, 448.0f), 1.0f));
  const float least = kind == CompressedKind::int8 ? -128.0f : -8.0f;
  return static_cast<std::uint8_t>(
      static_cast<std::int8_t>(std::clamp(std::nearbyint(of_scale), least, -least - 1)));
}

float compressed_value(CompressedKind kind, std::uint8_t code) {
  if (kind == CompressedKind::fp8)
    return tensor::fp8_decode<tensor::Fp8Format::e4m3, tensor::Fp8Number>(code);
  return static_cast<float>(static_cast<std::int8_t>(code));
}

void require_compressible(const CompressedScheme& scheme, const std::string& name,
                          std::span<const float> values, std::int64_t columns) {
  if (columns % scheme.group_of(columns) != 0)
    fail(ErrorKind::config, name, " has ", columns, " inputs, no multiple of groups of ", scheme.group,
         ": take --group with a divisor of all layers' widths, as 64 or 32");
  if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
    fail(ErrorKind::data, "a value of ", name, " is infinite or no number, and has no form in few bits");
}

CompressedMatrix round_to_nearest(const CompressedScheme& scheme, const std::string& name,
                                  std::span<const float> values, std::int64_t rows, std::int64_t columns) {
  require_compressible(scheme, name, values, columns);
  CompressedMatrix out{.rows = rows, .columns = columns, .group = scheme.group_of(columns)};
  out.codes.resize(values.size());
  const auto group = static_cast<std::size_t>(out.group);
  for (std::size_t begin = 0; begin < values.size(); begin += group) {
    const std::span<const float> of = values.subspan(begin, group);
    const float scale = compressed_scale(scheme, largest_of(of));
    out.scales.push_back(scale);
    for (std::size_t i = 0; i < group; ++i) out.codes[begin + i] = compressed_code(scheme.kind, of[i], scale);
  }
  return out;
}

void decompress(CompressedKind kind, const CompressedMatrix& matrix, std::span<float> to) {
  require(to.size() == matrix.codes.size(), "decompress: ", to.size(), " numbers of ", matrix.codes.size());
  std::array<float, 256> values;
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = compressed_value(kind, static_cast<std::uint8_t>(code));
  const auto group = static_cast<std::size_t>(matrix.group);
  for (std::size_t g = 0; g < matrix.scales.size(); ++g)
    for (std::size_t i = g * group; i < (g + 1) * group; ++i)
      to[i] = values[matrix.codes[i]] * matrix.scales[g];
}

void round_inputs(const CompressedScheme& scheme, float input_scale, std::span<float> rows,
                  std::int64_t columns) {
  const auto width = static_cast<std::size_t>(columns);
  for (std::size_t begin = 0; begin < rows.size(); begin += width) {
    const std::span<float> row = rows.subspan(begin, width);
    const float scale = input_scale > 0 ? input_scale : compressed_scale(scheme, largest_of(row));
    for (float& value : row)
      value = compressed_value(scheme.kind, compressed_code(scheme.kind, value, scale)) * scale;
  }
}

std::vector<std::byte> pack_int4(const CompressedMatrix& matrix) {
  const std::int64_t words = (matrix.columns + 7) / 8;
  std::vector<std::byte> out(static_cast<std::size_t>(matrix.rows * words * 4));
  for (std::int64_t row = 0; row < matrix.rows; ++row)
    for (std::int64_t column = 0; column < matrix.columns; ++column) {
      const auto code =
          static_cast<std::int8_t>(matrix.codes[static_cast<std::size_t>(row * matrix.columns + column)]);
      out[static_cast<std::size_t>(row * words * 4 + column / 2)] |=
          static_cast<std::byte>((code + 8) << (column % 2 == 0 ? 0 : 4));
    }
  return out;
}

}  // namespace sherd::models
