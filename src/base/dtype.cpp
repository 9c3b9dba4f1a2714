#include "base/dtype.h"

#include <array>
#include <cctype>
#include <string>

namespace sherd {

namespace {

struct TypeFacts {
  std::string_view name;
  std::size_t bytes;
};
/// In the order of DType.
constexpr std::array<TypeFacts, 8> types{{{"fp32", 4},
                                          {"bf16", 2},
                                          {"fp16", 2},
                                          {"fp64", 8},
                                          {"int32", 4},
                                          {"int64", 8},
                                          {"uint16", 2},
                                          {"uint8", 1}}};
static_assert(types.size() == static_cast<std::size_t>(DType::u8) + 1);

}  // namespace

std::size_t size_of(DType dtype) {
  return types[static_cast<std::size_t>(dtype)].bytes;
}

std::string_view name_of(DType dtype) {
  return types[static_cast<std::size_t>(dtype)].name;
}

std::optional<DType> parse_dtype(std::string_view name) {
  std::string lower;
  for (char c : name) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (std::size_t i = 0; i < types.size(); ++i)
    if (types[i].name == lower) return static_cast<DType>(i);
  if (lower == "float32" || lower == "float") return DType::f32;
  if (lower == "bfloat16") return DType::bf16;
  if (lower == "float16" || lower == "half") return DType::f16;
  return std::nullopt;
}

bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

f16::f16(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t magnitude = u & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal half: let the FPU round at the right place
    const float scaled = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(scaled) - 0x3f000000u;
  } else {
    half = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  bits = static_cast<std::uint16_t>(sign | half);
}

f16::operator float() const {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float value = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -value : value;
}

}  // namespace sherd
