#include "base/dtype.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <cmath>
#include <limits>

namespace sherd {
namespace {

/// Subnormal fp32 numbers count as they are, whatever an earlier test of this process left set.
class SmallFloats : public ::testing::Test {
 protected:
  SmallFloats() : control_(_mm_getcsr()) { _mm_setcsr(control_ & ~0x8040u); }
  ~SmallFloats() override { _mm_setcsr(control_); }

 private:
  unsigned control_;
};

/// `value` rounded to `digits` binary digits with exponents in [lowest, highest], to nearest, ties to even,
/// by arithmetic alone.
double round_by_arithmetic(double value, int digits, int lowest, int highest) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), lowest);
  const double scaled = std::nearbyint(std::ldexp(value, digits - 1 - exponent));
  const double out = std::ldexp(scaled, exponent - digits + 1);
  return std::fabs(out) >= std::ldexp(1.0, highest + 1) ? std::copysign(INFINITY, value) : out;
}

/// The value of a pattern, by the definition of the format.
double by_definition(std::uint32_t bits, int fraction_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
  const double fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
  const double sign = bits >> (fraction_bits + exponent_bits) ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + std::ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}

template <class Small>
void check_every_pattern(int fraction_bits, int exponent_bits) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    Small small;
    small.bits = static_cast<std::uint16_t>(bits);
    const float wide = static_cast<float>(small);
    const double want = by_definition(bits, fraction_bits, exponent_bits);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Small(wide)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), want) << bits;
    ASSERT_EQ(std::signbit(wide), std::signbit(want)) << bits;
    ASSERT_EQ(Small(wide).bits, bits);
  }
}

TEST_F(SmallFloats, every_bf16_pattern_has_the_value_the_format_defines) {
  check_every_pattern<bf16>(7, 8);
}
TEST_F(SmallFloats, every_fp16_pattern_has_the_value_the_format_defines) {
  check_every_pattern<f16>(10, 5);
}

TEST_F(SmallFloats, round_to_nearest_even_between_all_neighbours) {
  for (std::uint32_t high = 0; high < 0x7f80; ++high)
    for (const std::uint32_t low :
         {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = std::bit_cast<float>(high << 16 | low);
      ASSERT_EQ(static_cast<double>(static_cast<float>(bf16(value))),
                round_by_arithmetic(value, 8, -126, 127))
          << value;
      ASSERT_EQ(static_cast<double>(static_cast<float>(f16(value))), round_by_arithmetic(value, 11, -14, 15))
          << value;
      ASSERT_EQ(bf16(-value).bits, bf16(value).bits | 0x8000);
      ASSERT_EQ(f16(-value).bits, f16(value).bits | 0x8000);
    }
}

TEST(Masters, round_ties_away_so_that_the_high_half_can_be_rebuilt) {
  for (std::uint32_t high = 0; high < 0xff80; high += 7)
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      if ((high & 0x7fff) >= 0x7f7f) continue;  // may round to infinity
      const float master = std::bit_cast<float>(high << 16 | low);
      const std::uint32_t rounded = round_master_to_bf16(master).bits;
      ASSERT_EQ(rounded - (low >= 0x8000), high) << master;
    }
}

TEST(DTypes, have_names_that_parse_back_and_sizes) {
  for (const DType dtype :
       {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64, DType::u16, DType::u8})
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  EXPECT_EQ(parse_dtype("BFloat16"), DType::bf16);
  EXPECT_EQ(parse_dtype("half"), DType::f16);
  EXPECT_EQ(parse_dtype("fp8"), std::nullopt);
  EXPECT_EQ(size_of(DType::i64), 8u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_TRUE(is_floating(DType::f64));
  EXPECT_FALSE(is_floating(DType::u16));
}

}  // namespace
}  // namespace sherd
