// Rounding to nearest, against what compressed-tensors' own compressors write of the same numbers.
#include "models/compressed/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "models/compressed/reference_numbers.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using test::Numbers;

CompressedScheme scheme_of(CompressedKind kind) {
  return {.kind = kind, .group = 16};
}

TEST(CompressedMatrix, HasTheBytesOfCompressedTensors) {
  const Numbers numbers("matrix.safetensors");
  const auto values = numbers.of<float>("values");
  for (const CompressedKind kind : {CompressedKind::int8, CompressedKind::fp8, CompressedKind::int4}) {
    const std::string name = name_of(kind);
    SCOPED_TRACE(name);
    const CompressedMatrix made = round_to_nearest(scheme_of(kind), "w", values, 7, 48);
    EXPECT_EQ(made.scales, numbers.of<float>(name + ".weight_scale"));
    if (kind == CompressedKind::int4) {
      EXPECT_EQ(pack_int4(made), numbers.of<std::byte>(name + ".weight_packed"));
      EXPECT_EQ(numbers.shape(name + ".weight_packed"), (std::vector<std::int64_t>{7, 6}));
    } else {
      const auto theirs = numbers.of<std::uint8_t>(name + ".weight");
      ASSERT_EQ(theirs.size(), made.codes.size());
      // 0 has two codes in E4M3.
      for (std::size_t i = 0; i < theirs.size(); ++i)
        ASSERT_TRUE(made.codes[i] == theirs[i] ||
                    (kind == CompressedKind::fp8 && (theirs[i] & 0x7f) == 0 && (made.codes[i] & 0x7f) == 0))
            << i << ": " << int(made.codes[i]) << " for " << int(theirs[i]);
    }
  }
}

TEST(CompressedMatrix, RoundsInputsAsCompressedTensorsDoes) {
  const Numbers numbers("matrix.safetensors");
  for (const CompressedKind kind : {CompressedKind::int8, CompressedKind::fp8}) {
    const std::string name = name_of(kind);
    SCOPED_TRACE(name);
    auto rows = numbers.of<float>("inputs");
    float largest = 0;
    for (const float value : rows) largest = std::max(largest, std::abs(value));
    const float scale = compressed_scale(scheme_of(kind), largest);
    EXPECT_EQ(scale, numbers.of<float>(name + ".input_scale")[0]);
    auto by_one = rows;
    round_inputs(scheme_of(kind), 0, rows, 48);
    EXPECT_EQ(rows, numbers.of<float>(name + ".token"));
    round_inputs(scheme_of(kind), scale, by_one, 48);
    EXPECT_EQ(by_one, numbers.of<float>(name + ".tensor"));
  }
}

TEST(CompressedMatrix, StandsForWhatItsCodesSay) {
  const CompressedMatrix int4{
      .rows = 1, .columns = 4, .group = 2, .codes = {0xf8, 7, 1, 0xff}, .scales = {2, 0.5f}};
  std::vector<float> to(4);
  decompress(CompressedKind::int4, int4, to);
  EXPECT_EQ(to, (std::vector<float>{-16, 14, 0.5f, -0.5f}));
  const CompressedMatrix fp8{
      .rows = 2, .columns = 2, .group = 2, .codes = {0x38, 0x7e, 0xc0, 1}, .scales = {1, 2}};
  decompress(CompressedKind::fp8, fp8, to);
  EXPECT_EQ(to, (std::vector<float>{1, 448, -4, 0x1p-8f}));
}

/// A scale is one that the files can hold, and codes are of that one.
TEST(CompressedMatrix, ScalesAreThoseOfTheFile) {
  CompressedScheme scheme = scheme_of(CompressedKind::int8);
  scheme.scale_dtype = DType::bf16;
  const float scale = compressed_scale(scheme, 1.0f);
  EXPECT_EQ(scale, static_cast<float>(bf16(1.0f / 127.5f)));
  EXPECT_NE(scale, 1.0f / 127.5f);
  EXPECT_EQ(compressed_scale(scheme, 0), 0x1p-7f);
  scheme.scale_dtype = DType::f16;
  EXPECT_EQ(compressed_scale(scheme, 1.0f), static_cast<float>(f16(1.0f / 127.5f)));
  EXPECT_EQ(compressed_scale(scheme, 0), 0x1p-10f);
}

TEST(CompressedMatrix, RefusesWhatHasNoForm) {
  std::vector<float> values(48, 1.0f);
  CompressedScheme scheme = scheme_of(CompressedKind::int4);
  scheme.group = 32;
  testing::expect_error(ErrorKind::config, "w has 48 inputs, no multiple of groups of 32: take --group",
                        [&] { round_to_nearest(scheme, "w", values, 1, 48); });
  values[7] = std::numeric_limits<float>::quiet_NaN();
  testing::expect_error(ErrorKind::data, "a value of w is infinite or no number",
                        [&] { round_to_nearest(scheme_of(CompressedKind::int8), "w", values, 1, 48); });
}

}  // namespace
}  // namespace sherd::models
