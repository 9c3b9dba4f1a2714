// Values in blocks: bytes of the gguf package where it writes a type, what it reads where it does not, and
// bounds.
#include "models/gguf/gguf_blocks.h"

#include <cmath>

#include "gguf_reader.h"
#include "support/expect_error.h"
#include "support/places.h"
#include "support/reference_file.h"

namespace sherd::models {
namespace {

using test::decoded;

std::map<std::string, test::ReferenceTensor> reference() {
  return test::read_reference(std::string(SHERD_SOURCE_DIR) +
                              "/tests/models/gguf/reference/blocks.safetensors");
}

std::string encoded(GgufType type, const std::vector<float>& values) {
  std::string out(bytes_of_row(type, std::ssize(values)), '\0');
  encode_gguf(type, values, std::as_writable_bytes(std::span(out)));
  return out;
}

double squares_apart(const std::vector<float>& values, const std::vector<double>& stand_for, std::size_t from,
                     std::size_t count) {
  double out = 0;
  for (std::size_t i = from; i < from + count; ++i) out += std::pow(values[i] - stand_for[i], 2);
  return out;
}

TEST(GgufBlocks, HaveTheBytesOfTheGgufPackage) {
  const auto file = reference();
  const std::vector<float> values = file.at("values").values<float>();
  for (const GgufType type : {GgufType::f16, GgufType::bf16, GgufType::q8_0, GgufType::q4_0}) {
    const auto& bytes = file.at(std::string(name_of(type))).bytes;
    EXPECT_TRUE(encoded(type, values) ==
                std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()))
        << name_of(type);
  }
}

/// The reader of these tests is right, so that it may judge what is written.
TEST(GgufBlocks, AreReadAsTheGgufPackageReadsThem) {
  const auto file = reference();
  for (const GgufType type : {GgufType::q4_k, GgufType::q6_k}) {
    const std::string name(name_of(type));
    const auto& bytes = file.at(name).bytes;
    const std::vector<float> want = file.at(name + ".values").values<float>();
    const std::vector<double> got =
        decoded(type, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], want[i], 1e-5 * std::abs(want[i]) + 1e-9) << i;
  }
}

/// No value is further away than half a step, and what scales round by: of q4_k a step is the part's range, 0
/// among it, over 15, and scales and least values are rounded to 63rds of the block's largest.
TEST(GgufBlocks, StayWithinHalfAStep) {
  const std::vector<float> values = reference().at("values").values<float>();
  const std::vector<double> four = decoded(GgufType::q4_k, encoded(GgufType::q4_k, values)),
                            six = decoded(GgufType::q6_k, encoded(GgufType::q6_k, values));
  for (std::size_t block = 0; block < values.size(); block += 256) {
    double range = 0, depth = 0, largest = 0;
    const auto ends = [&](std::size_t part, std::size_t size) {
      const auto [low, high] = std::minmax_element(values.begin() + static_cast<std::ptrdiff_t>(part),
                                                   values.begin() + static_cast<std::ptrdiff_t>(part + size));
      return std::pair<double, double>(std::min(0.0f, *low), std::max(0.0f, *high));
    };
    for (std::size_t part = block; part < block + 256; part += 32) {
      const auto [low, high] = ends(part, 32);
      range = std::max(range, high - low), depth = std::max(depth, -low);
      largest = std::max({largest, high, -low});
    }
    for (std::size_t i = block; i < block + 256; ++i) {
      const auto [low, high] = ends(i / 32 * 32, 32);
      // Scales of the search may leave out a little of a part's ends.
      const double step = (high - low) / 15, coarse = 15 * range / 15 / 126 + depth / 126;
      EXPECT_LE(std::abs(values[i] - four[i]), 1.3 * step + 1.5 * coarse + 1e-6) << i;
      const auto [low_6, high_6] = ends(i / 16 * 16, 16);
      const double six_step = std::max(high_6, -low_6) / 31;
      EXPECT_LE(std::abs(values[i] - six[i]), 1.1 * six_step + largest / 240 + 1e-6) << i;
    }
  }
}

/// Least squares leave less than the range of each part cut into 15 steps, with scales of all bits.
TEST(GgufBlocks, SearchForTheirScales) {
  const std::vector<float> values = reference().at("values").values<float>();
  const std::vector<double> four = decoded(GgufType::q4_k, encoded(GgufType::q4_k, values)),
                            six = decoded(GgufType::q6_k, encoded(GgufType::q6_k, values));
  std::vector<double> plain(values.size());
  for (std::size_t part = 0; part < values.size(); part += 32) {
    const auto [low, high] = std::minmax_element(values.begin() + static_cast<std::ptrdiff_t>(part),
                                                 values.begin() + static_cast<std::ptrdiff_t>(part + 32));
    const double from = std::min(0.0f, *low), step = (std::max(0.0f, *high) - from) / 15;
    for (std::size_t i = part; i < part + 32; ++i)
      plain[i] = step == 0 ? 0 : from + step * std::round((values[i] - from) / step);
  }
  const double squares = squares_apart(values, std::vector<double>(values.size()), 0, 256);
  EXPECT_LT(squares_apart(values, four, 0, 256), 0.97 * squares_apart(values, plain, 0, 256));
  EXPECT_LT(squares_apart(values, four, 0, 256), 0.0060 * squares);  // 7.7 % root mean square
  EXPECT_LT(squares_apart(values, six, 0, 256), 0.00036 * squares);  // 1.9 %
}

TEST(GgufBlocks, KeepZeroAndConstants) {
  for (const GgufType type : {GgufType::q4_0, GgufType::q8_0, GgufType::q4_k, GgufType::q6_k}) {
    for (const double value : decoded(type, encoded(type, std::vector<float>(256))))
      ASSERT_EQ(value, 0) << name_of(type);
    for (const double value : decoded(type, encoded(type, std::vector<float>(256, 0.75f))))
      ASSERT_NEAR(value, 0.75, 0.006) << name_of(type);
    for (const double value : decoded(type, encoded(type, std::vector<float>(256, -0.75f))))
      ASSERT_NEAR(value, -0.75, 0.006) << name_of(type);
  }
}

TEST(GgufBlocks, AreWhole) {
  testing::expect_error(ErrorKind::usage, "rows of 100 values are no whole blocks of q4_k",
                        [] { bytes_of_row(GgufType::q4_k, 100); });
  EXPECT_EQ(bytes_of_row(GgufType::q4_k, 512), 288);
  EXPECT_EQ(parse_gguf_type("q6_k"), GgufType::q6_k);
  EXPECT_FALSE(parse_gguf_type("q5_k"));
}

}  // namespace
}  // namespace sherd::models
