#pragma once

#include <cstdint>

// Made by scripts/references/make_stored_reference.py with bitsandbytes 0.50.2, torch 2.15.0.
namespace sherd::test::stored_reference {

inline constexpr std::int64_t count = 6437, doubles = 2;
inline constexpr std::uint32_t scale_values = 0x28f6b49c;
inline constexpr std::uint32_t nf4_codes = 0x14a8948f;
inline constexpr std::uint32_t nf4_scales = 0x469732b2;
inline constexpr std::uint32_t nf4_values = 0x5f2acfec;
inline constexpr std::uint32_t nf4_bf16 = 0xddeb1100;
inline constexpr std::uint32_t nf4_double_codes = 0x739042ae;
inline constexpr std::uint32_t nf4_double_scale_codes = 0xe0e441ff;
inline constexpr std::uint32_t nf4_double_scale_scales = 0x1f047b7a;
inline constexpr std::uint32_t nf4_double_offsets = 0xcbfded01;
inline constexpr std::uint32_t nf4_double_values = 0x20cc1dcc;
inline constexpr std::uint32_t fp4_codes = 0xe260cf4b;
inline constexpr std::uint32_t fp4_scales = 0x469732b2;
inline constexpr std::uint32_t fp4_values = 0x6c7ed54b;
inline constexpr std::uint32_t fp4_bf16 = 0x14d5b6be;
inline constexpr std::uint32_t fp4_double_codes = 0x163115bf;
inline constexpr std::uint32_t fp4_double_scale_codes = 0xe0e441ff;
inline constexpr std::uint32_t fp4_double_scale_scales = 0x1f047b7a;
inline constexpr std::uint32_t fp4_double_offsets = 0xcbfded01;
inline constexpr std::uint32_t fp4_double_values = 0x659d2783;

}  // namespace sherd::test::stored_reference
