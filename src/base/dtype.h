#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace sherd {

/// Element types. Arithmetic kernels take the floating ones; the integers carry token ids and bytes.
enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, u16, u8 };

std::size_t size_of(DType dtype);
/// "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint16", "uint8".
std::string_view name_of(DType dtype);
/// Inverse of name_of, ignoring case; also accepts "float32", "bfloat16", "float16", "half" and "float".
std::optional<DType> parse_dtype(std::string_view name);
bool is_floating(DType dtype);

/// bfloat16 storage. Conversion to float is exact; from float rounds to nearest, ties to even (activations).
/// Masters round with round_master_to_bf16 instead.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value);
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

/// IEEE half storage, rounded to nearest, ties to even.
struct f16 {
  std::uint16_t bits = 0;
  f16() = default;
  explicit f16(float value);
  explicit operator float() const;
};

inline bf16::bf16(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    bits = static_cast<std::uint16_t>((u >> 16) | 0x40u);  // keep NaN a NaN
  else
    bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/// Rounds an fp32 master weight to bf16, to nearest, ties away from zero, so that the master's high half can
/// be rebuilt from the parameter and the master's 16 low bits. Finite input only.
inline bf16 round_master_to_bf16(float value) {
  bf16 out;
  out.bits = static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + 0x8000u) >> 16);
  return out;
}

/// Maps a C++ element type to its DType.
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) {
    return DType::f32;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return DType::bf16;
  } else if constexpr (std::is_same_v<T, f16>) {
    return DType::f16;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::f64;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return DType::i32;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return DType::i64;
  } else if constexpr (std::is_same_v<T, std::uint16_t>) {
    return DType::u16;
  } else {
    static_assert(std::is_same_v<T, std::uint8_t>);
    return DType::u8;
  }
}

}  // namespace sherd
