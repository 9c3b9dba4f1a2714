#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace sherd::engine {

/// One element type of the safetensors format, in the order in which the reference writer sorts them.
struct SafetensorsType {
  std::string_view name;
  std::uint32_t bits;
  std::optional<DType> dtype;
};

inline constexpr std::array<SafetensorsType, 22> safetensors_types{{
    {"BOOL", 8, {}},         {"F4", 4, {}},           {"F6_E2M3", 6, {}},        {"F6_E3M2", 6, {}},
    {"U8", 8, DType::u8},    {"I8", 8, {}},           {"F8_E5M2", 8, {}},        {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},      {"F8_E4M3FNUZ", 8, {}},  {"F8_E5M2FNUZ", 8, {}},    {"I16", 16, {}},
    {"U16", 16, DType::u16}, {"F16", 16, DType::f16}, {"BF16", 16, DType::bf16}, {"I32", 32, DType::i32},
    {"U32", 32, {}},         {"F32", 32, DType::f32}, {"C64", 64, {}},           {"F64", 64, DType::f64},
    {"I64", 64, DType::i64}, {"U64", 64, {}},
}};

/// Longest header the format allows.
inline constexpr std::uint64_t safetensors_header_limit = 100'000'000;

}  // namespace sherd::engine
