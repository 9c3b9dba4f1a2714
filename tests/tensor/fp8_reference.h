#pragma once

#include <cstdint>

// Made by scripts/references/make_fp8_reference.py with torch 2.15.0.
namespace sherd::test::fp8_reference {

inline constexpr std::int64_t e4m3_count = 34768;
inline constexpr std::uint32_t e4m3 = 0x7101f42e;
inline constexpr std::int64_t e5m2_count = 36576;
inline constexpr std::uint32_t e5m2 = 0x5b79eaf8;

inline constexpr std::int64_t rows = 130, cols = 300;
inline constexpr std::uint32_t runs_codes = 0xeadde701;
inline constexpr std::uint32_t runs_exponents = 0x0bcc4e9f;
inline constexpr std::uint32_t squares_codes = 0x9f000ca3;
inline constexpr std::uint32_t squares_exponents = 0x6fa4effb;

}  // namespace sherd::test::fp8_reference
