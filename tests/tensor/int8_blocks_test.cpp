// Weights in 8 bits, against their formula in double.
#include "tensor/formats/int8_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::dequantize_int8;
using tensor::int8_bytes;
using tensor::quantize_int8;

/// Blocks of all sizes of magnitudes, and of one large element among small ones.
std::vector<float> random_values(std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-90, 90);
  std::vector<float> out(count);
  float size = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 64 == 0) size = i / 64 % 3 ? std::ldexp(1.0f, exponent(random)) : 0.02f;
    out[i] = normal(random) * size;
    if (i % 640 == 63) out[i] *= 1e6f;
  }
  return out;
}

std::vector<std::byte> blocks_of(const std::vector<float>& values, int threads = 1) {
  Arena arena(threads);
  std::vector<std::byte> out(static_cast<std::size_t>(int8_bytes(static_cast<std::int64_t>(values.size()))));
  EXPECT_TRUE(quantize_int8(values, out.data(), arena));
  return out;
}

std::vector<float> values_in(const std::vector<std::byte>& blocks, std::size_t count) {
  std::vector<float> out(count);
  dequantize_int8(blocks.data(), 0, out);
  return out;
}

float scale_of(const std::vector<std::byte>& blocks, std::size_t block) {
  float scale;
  std::memcpy(&scale, blocks.data() + block * 68 + 64, 4);
  return scale;
}

TEST(Int8Blocks, CodesAreTheNearestAndTheLargestMagnitudeSetsTheScale) {
  const std::vector<float> values = random_values(64 * 500);
  const auto blocks = blocks_of(values);
  const auto got = values_in(blocks, values.size());
  for (std::size_t b = 0; b < 500; ++b) {
    double most = 0;
    for (std::size_t i = b * 64; i < b * 64 + 64; ++i) most = std::max(most, std::abs(double{values[i]}));
    const double scale = scale_of(blocks, b);
    ASSERT_LE(scale, most / 127 * (1 + 0x1p-24));
    ASSERT_GE(scale, most / 127 * (1 - 0x1p-15));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(scale_of(blocks, b)) & 0x7fu, 0U);
    for (std::size_t i = b * 64; i < b * 64 + 64; ++i) {
      const int code = std::to_integer<std::int8_t>(blocks[b * 68 + i % 64]);
      ASSERT_LE(std::abs(values[i] / scale - code), 0.5 + 1e-5) << i;
      ASSERT_LE(std::abs(code), 127);
      ASSERT_EQ(double{got[i]}, code * scale) << "exact in fp32";
    }
  }
}

TEST(Int8Blocks, HalvesGoToTheEvenCode) {
  std::vector<float> values(64);
  values[0] = 127, values[1] = 0.5f, values[2] = 1.5f, values[3] = -2.5f, values[4] = -0.5f,
  values[5] = 126.5f;
  const auto blocks = blocks_of(values);
  const std::vector<int> expected{127, 0, 2, -2, 0, 126};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::to_integer<std::int8_t>(blocks[i]), expected[i]) << i;
}

/// That is why checkpoints give the same blocks again.
TEST(Int8Blocks, ValuesGiveTheirBlocksAgain) {
  std::vector<float> values = random_values(64 * 20000);
  const float most = std::numeric_limits<float>::max(), normal = std::numeric_limits<float>::min();
  const auto set = [&](std::size_t block, std::vector<float> of) {
    of.resize(64);
    std::copy(of.begin(), of.end(), values.begin() + static_cast<std::ptrdiff_t>(block * 64));
  };
  set(0, {});
  set(1, {-0.0f, normal / 2, -normal / 4});
  set(2, {most, -most, 1, normal});
  set(3, {-most, most / 254, -most / 253});
  set(4, {127 * 0x1p-100f, -0x1p-101f});
  set(5, {127 * 0x1.fffffep-101f, 0x1p-110f});
  set(6, std::vector<float>(64, 3e-7f));
  for (const int threads : {1, 2}) {
    const auto blocks = blocks_of(values, threads);
    const auto again = values_in(blocks, values.size());
    for (const float value : again) ASSERT_TRUE(std::isfinite(value));
    ASSERT_EQ(blocks_of(again), blocks);
    ASSERT_EQ(scale_of(blocks, 0), 0);
    ASSERT_EQ(scale_of(blocks, 1), 0);
    ASSERT_GT(scale_of(blocks, 4), 0);
    ASSERT_EQ(scale_of(blocks, 5), 0);
    ASSERT_EQ(again[4 * 64], 127 * 0x1p-100f);
    ASSERT_NEAR(again[2 * 64] / most, 1, 1e-4);
  }
}

TEST(Int8Blocks, ALastBlockIsFilledWithZerosAndPartsAreRead) {
  const std::vector<float> values = random_values(64 * 3);
  const std::vector<float> shorter(values.begin(), values.begin() + 150);
  const auto blocks = blocks_of(shorter);
  ASSERT_EQ(blocks.size(), 3U * 68);
  for (std::size_t i = 150 - 128; i < 64; ++i) EXPECT_EQ(blocks[2 * 68 + i], std::byte{0});
  const auto all = values_in(blocks, 150);
  std::vector<float> part(100);
  dequantize_int8(blocks.data(), 45, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 45));
}

TEST(Int8Blocks, WhatIsNotFiniteIsRefused) {
  Arena arena(2);
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values(64 * 2000 + 10, 1.0f);
    std::vector<std::byte> blocks(static_cast<std::size_t>(int8_bytes(64 * 2000 + 10)));
    ASSERT_TRUE(quantize_int8(values, blocks.data(), arena));
    values[64 * 2000 + 9] = bad;
    EXPECT_FALSE(quantize_int8(values, blocks.data(), arena));
  }
}

/// On every instruction set, and on the GPU's kernels.
template <class T>
void expect_values(Machine& m, const std::vector<std::byte>& blocks, const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(blocks.size());
  std::memcpy(bytes.data(), blocks.data(), blocks.size());
  const Tensor from = m.holding({static_cast<std::int64_t>(bytes.size())}, bytes);
  Tensor to = m.empty({static_cast<std::int64_t>(values.size())}, dtype_of<T>());
  m.kernels.dequantize(from, to);
  to = m.host(to);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(static_cast<float>(to.data<T>()[i]), static_cast<float>(T(values[i])))
        << "element " << i << " on " << m.name();
}

TEST(Int8Blocks, KernelsGiveTheValuesRoundedOnce) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const std::size_t count : {std::size_t{64}, std::size_t{64 * 37}, std::size_t{64 * 1500}}) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    const auto blocks = blocks_of(values);
    values = values_in(blocks, count);
    for (const auto& machine : all_machines()) {
      expect_values<float>(*machine, blocks, values);
      expect_values<bf16>(*machine, blocks, values);
      expect_values<f16>(*machine, blocks, values);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Int8Blocks, KernelsCheckTheirArguments) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor blocks = m.empty({68}, DType::u8);
    expect_error(ErrorKind::usage, "are not the blocks of",
                 [&] { m.kernels.dequantize(blocks, m.empty({128}, DType::bf16)); });
    expect_error(ErrorKind::usage, "must be uint8",
                 [&] { m.kernels.dequantize(m.empty({68}, DType::u16), m.empty({64}, DType::bf16)); });
    expect_error(ErrorKind::usage, "not fp64",
                 [&] { m.kernels.dequantize(blocks, m.empty({64}, DType::f64)); });
  }
}

}  // namespace
}  // namespace sherd::test
