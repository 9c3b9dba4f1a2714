// Weights in few bits: bitsandbytes' codes, scales and values (scripts/references/make_stored_reference.py),
// formulas in double, and every kernel's values.
#include "tensor/formats/stored_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/crc32c.h"
#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/stored_reference.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::block_size;
using tensor::stored_bytes;

constexpr StoredFormat every_format[] = {
    StoredFormat::bf16,       StoredFormat::int8,       StoredFormat::nf4,   StoredFormat::fp4,
    StoredFormat::nf4_double, StoredFormat::fp4_double, StoredFormat::mxfp4, StoredFormat::fp8};

bool is_double(StoredFormat format) {
  return format == StoredFormat::nf4_double || format == StoredFormat::fp4_double;
}

/// Blocks of all sizes of magnitudes, and of one large element among small ones.
std::vector<float> random_values(std::size_t count, int least = -90, int most = 90) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(least, most);
  std::vector<float> out(count);
  float size = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 64 == 0) size = i / 64 % 3 ? std::ldexp(1.0f, exponent(random)) : 0.02f;
    out[i] = normal(random) * size;
    if (i % 640 == 63) out[i] *= 1e6f;
  }
  return out;
}

std::vector<std::byte> blocks_of(StoredFormat format, const std::vector<float>& values, int threads = 1) {
  Arena arena(threads);
  std::vector<std::byte> out(
      static_cast<std::size_t>(stored_bytes(format, static_cast<std::int64_t>(values.size()))));
  EXPECT_TRUE(tensor::quantize(format, values, out.data(), arena));
  return out;
}

std::vector<float> values_in(StoredFormat format, const std::vector<std::byte>& blocks, std::size_t count) {
  std::vector<float> out(count);
  tensor::dequantize(format, blocks.data(), 0, out);
  return out;
}

template <class T>
std::uint32_t checksum(const std::vector<T>& of) {
  return crc32c(of.data(), of.size() * sizeof(T));
}

float number_at(const std::vector<std::byte>& blocks, std::size_t at) {
  float number;
  std::memcpy(&number, blocks.data() + at, 4);
  return number;
}

/// As scripts/references/make_stored_reference.py has it.
float element(std::int64_t i) {
  std::int64_t sum = 0;
  for (std::uint64_t k = 0; k < 4; ++k)
    sum += static_cast<std::int64_t>(
        (static_cast<std::uint64_t>(i) * 2654435761u + k * 2246822519u) % (std::uint64_t{1} << 32) >> 8 &
        0xffff);
  return static_cast<float>(
      std::ldexp(static_cast<double>(sum - 131070) / 65536, static_cast<int>(i / 64 * 7 % 5 - 6)));
}

struct Reference {
  StoredFormat single, twice;
  std::uint32_t codes, scales, values, bf16_values, double_codes, scale_codes, scale_scales, offsets,
      double_values;
};
namespace reference = stored_reference;
const Reference references[] = {
    {StoredFormat::nf4, StoredFormat::nf4_double, reference::nf4_codes, reference::nf4_scales,
     reference::nf4_values, reference::nf4_bf16, reference::nf4_double_codes,
     reference::nf4_double_scale_codes, reference::nf4_double_scale_scales, reference::nf4_double_offsets,
     reference::nf4_double_values},
    {StoredFormat::fp4, StoredFormat::fp4_double, reference::fp4_codes, reference::fp4_scales,
     reference::fp4_values, reference::fp4_bf16, reference::fp4_double_codes,
     reference::fp4_double_scale_codes, reference::fp4_double_scale_scales, reference::fp4_double_offsets,
     reference::fp4_double_values}};

TEST(StoredFormats, FourBitsAreThoseOfBitsandbytes) {
  std::vector<float> x(reference::count);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = element(static_cast<std::int64_t>(i));
  for (const Reference& expected : references) {
    const auto blocks = blocks_of(expected.single, x);
    std::vector<std::byte> codes;
    std::vector<float> scales;
    for (std::size_t at = 0; at < blocks.size(); at += 36) {
      codes.insert(codes.end(), blocks.begin() + static_cast<std::ptrdiff_t>(at),
                   blocks.begin() + static_cast<std::ptrdiff_t>(at + 32));
      scales.push_back(number_at(blocks, at + 32));
    }
    codes.resize((x.size() + 1) / 2);
    EXPECT_EQ(checksum(codes), expected.codes);
    EXPECT_EQ(checksum(scales), expected.scales);
    const auto values = values_in(expected.single, blocks, x.size());
    EXPECT_EQ(checksum(values), expected.values);
    EXPECT_EQ(checksum(std::vector<bf16>(values.begin(), values.end())), expected.bf16_values);
  }
}

TEST(StoredFormats, ScalesInEightBitsAreThoseOfBitsandbytes) {
  const auto map = tensor::scale_values();
  EXPECT_EQ(crc32c(map.data(), map.size_bytes()), reference::scale_values);
  std::vector<float> x(16384 * reference::doubles);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = element(static_cast<std::int64_t>(i));
  for (const Reference& expected : references) {
    const auto blocks = blocks_of(expected.twice, x);
    std::vector<std::byte> codes, scale_codes;
    std::vector<float> scales, offsets;
    for (std::size_t at = 0; at < blocks.size(); at += 8456) {
      const auto begin = blocks.begin() + static_cast<std::ptrdiff_t>(at);
      codes.insert(codes.end(), begin, begin + 8192);
      scale_codes.insert(scale_codes.end(), begin + 8192, begin + 8448);
      scales.push_back(number_at(blocks, at + 8448)), offsets.push_back(number_at(blocks, at + 8452));
    }
    EXPECT_EQ(checksum(codes), expected.double_codes);
    EXPECT_EQ(checksum(offsets), expected.offsets);
    EXPECT_EQ(checksum(scales), expected.scale_scales);
    EXPECT_EQ(checksum(scale_codes), expected.scale_codes);
    EXPECT_EQ(checksum(values_in(expected.twice, blocks, x.size())), expected.double_values);
  }
}

TEST(StoredFormats, BytesOfAWeight) {
  const auto of_a_million = [](StoredFormat format) { return stored_bytes(format, 1 << 20); };
  EXPECT_EQ(of_a_million(StoredFormat::nf4), (1 << 19) + (1 << 14) * 4);
  EXPECT_EQ(of_a_million(StoredFormat::nf4_double), (1 << 19) + (1 << 14) + (1 << 6) * 8);
  EXPECT_EQ(of_a_million(StoredFormat::mxfp4), (1 << 19) + (1 << 15));
  EXPECT_EQ(of_a_million(StoredFormat::int8), (1 << 20) + (1 << 14) * 4);
  EXPECT_EQ(of_a_million(StoredFormat::fp8), (1 << 20) + (1 << 13) * 4);
  EXPECT_EQ(of_a_million(StoredFormat::bf16), 1 << 21);
  for (const StoredFormat format : every_format) {
    EXPECT_EQ(tensor::parse_stored_format(tensor::name_of(format)), format);
    EXPECT_EQ(stored_bytes(format, 1), block_size(format).bytes);
  }
  EXPECT_FALSE(tensor::parse_stored_format("int4"));
  expect_error(ErrorKind::usage, "no blocks", [] { block_size(StoredFormat::compute); });
}

TEST(StoredFormats, Int8CodesAreTheNearestAndTheLargestMagnitudeSetsTheScale) {
  const std::vector<float> values = random_values(64 * 500);
  const auto blocks = blocks_of(StoredFormat::int8, values);
  const auto got = values_in(StoredFormat::int8, blocks, values.size());
  for (std::size_t b = 0; b < 500; ++b) {
    double most = 0;
    for (std::size_t i = b * 64; i < b * 64 + 64; ++i) most = std::max(most, std::abs(double{values[i]}));
    const double scale = number_at(blocks, b * 68 + 64);
    ASSERT_LE(scale, most / 127 * (1 + 0x1p-24));
    ASSERT_GE(scale, most / 127 * (1 - 0x1p-15));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(static_cast<float>(scale)) & 0x7fu, 0U);
    for (std::size_t i = b * 64; i < b * 64 + 64; ++i) {
      const int code = std::to_integer<std::int8_t>(blocks[b * 68 + i % 64]);
      ASSERT_LE(std::abs(values[i] / scale - code), 0.5 + 1e-5) << i;
      ASSERT_LE(std::abs(code), 127);
      ASSERT_EQ(double{got[i]}, code * scale) << "exact in fp32";
    }
  }
}

TEST(StoredFormats, Int8HalvesGoToTheEvenCode) {
  std::vector<float> values(64);
  values[0] = 127, values[1] = 0.5f, values[2] = 1.5f, values[3] = -2.5f, values[4] = -0.5f,
  values[5] = 126.5f;
  const auto blocks = blocks_of(StoredFormat::int8, values);
  const std::vector<int> expected{127, 0, 2, -2, 0, 126};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::to_integer<std::int8_t>(blocks[i]), expected[i]) << i;
}

/// Each value is the nearest that its block's scale has; a tie goes to the code that is even.
TEST(StoredFormats, Mxfp4HasTheNearestOfItsValues) {
  std::vector<float> values = random_values(32 * 1000, -60, 60);
  const std::vector<float> ties{6, 0.25f, -0.75f, 1.25f, 1.75f, -2.5f, 3.5f, 5, 7.9f, -0.0f};
  std::copy(ties.begin(), ties.end(), values.begin());
  std::fill_n(values.begin() + 10, 22, 0.0f);
  const std::vector<float> nearest{6, 0, -1, 1, 2, -2, 4, 4, 6, 0};
  const auto got = values_in(StoredFormat::mxfp4, blocks_of(StoredFormat::mxfp4, values), values.size());
  for (std::size_t i = 0; i < nearest.size(); ++i) EXPECT_EQ(got[i], nearest[i]) << i;
  for (std::size_t b = 1; b < 1000; ++b) {
    double most = 0;
    for (std::size_t i = b * 32; i < b * 32 + 32; ++i) most = std::max(most, std::abs(double{values[i]}));
    const double scale = std::exp2(std::floor(std::log2(most)) - 2);
    for (std::size_t i = b * 32; i < b * 32 + 32; ++i) {
      double best = 1e300;
      for (const double value : {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0})
        best = std::min(best, std::abs(std::abs(double{values[i]}) - value * scale));
      ASSERT_EQ(std::abs(double{got[i]} - values[i]), best) << "element " << i;
    }
  }
}

/// Three bits behind the leading one, or the least step, of a scale with which the largest is near 448.
TEST(StoredFormats, Fp8IsWithinHalfAStep) {
  const std::vector<float> values = random_values(128 * 500, -40, 60);
  const auto got = values_in(StoredFormat::fp8, blocks_of(StoredFormat::fp8, values), values.size());
  for (std::size_t b = 0; b < 500; ++b) {
    double most = 0;
    for (std::size_t i = b * 128; i < b * 128 + 128; ++i) most = std::max(most, std::abs(double{values[i]}));
    const double scale = std::exp2(std::ceil(std::log2(most / 448)));
    for (std::size_t i = b * 128; i < b * 128 + 128; ++i)
      ASSERT_LE(std::abs(double{got[i]} - values[i]),
                std::max(std::abs(double{values[i]}) / 16, scale * 0x1p-10))
          << i;
  }
}

/// That is why checkpoints give the same blocks again.
TEST(StoredFormats, ValuesGiveTheirBlocksAgain) {
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
  set(7, {0x1p-120f, -0x1p-122f});
  for (const StoredFormat format : every_format) {
    if (is_double(format)) continue;
    if (format == StoredFormat::bf16) set(2, {}), set(3, {});  // which round to infinity
    for (const int threads : {1, 2}) {
      const auto blocks = blocks_of(format, values, threads);
      const auto again = values_in(format, blocks, values.size());
      for (const float value : again) ASSERT_TRUE(std::isfinite(value)) << tensor::name_of(format);
      // Two of fp4's codes stand for 0, and a block of fp8 may have a smaller scale, where codes are larger.
      if (format == StoredFormat::fp4 || format == StoredFormat::fp8)
        ASSERT_EQ(values_in(format, blocks_of(format, again), again.size()), again);
      else
        ASSERT_TRUE(blocks_of(format, again) == blocks) << tensor::name_of(format);
    }
  }
}

TEST(StoredFormats, ALastBlockIsFilledWithZerosAndPartsAreRead) {
  for (const StoredFormat format : every_format) {
    const std::int64_t block = block_size(format).elements;
    std::vector<float> values = random_values(static_cast<std::size_t>(3 * block), -20, 20);
    values.resize(static_cast<std::size_t>(2 * block + block / 3));
    auto padded = values;
    padded.resize(static_cast<std::size_t>(3 * block));
    const auto blocks = blocks_of(format, values);
    EXPECT_EQ(blocks, blocks_of(format, padded)) << tensor::name_of(format);
    const auto all = values_in(format, blocks, values.size());
    std::vector<float> part(static_cast<std::size_t>(block + block / 2));
    tensor::dequantize(format, blocks.data(), block / 3 + 1, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + block / 3 + 1)) << tensor::name_of(format);
  }
}

TEST(StoredFormats, WhatIsNotFiniteIsRefused) {
  Arena arena(2);
  for (const StoredFormat format : every_format)
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> values(64 * 2000 + 10, 1.0f);
      std::vector<std::byte> blocks(static_cast<std::size_t>(stored_bytes(format, 64 * 2000 + 10)));
      ASSERT_TRUE(tensor::quantize(format, values, blocks.data(), arena));
      values[64 * 2000 + 9] = bad;
      EXPECT_FALSE(tensor::quantize(format, values, blocks.data(), arena));
    }
}

/// On every instruction set, and on the GPU's kernels.
template <class T>
void expect_values(Machine& m, StoredFormat format, const std::vector<std::byte>& blocks,
                   const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(blocks.size());
  std::memcpy(bytes.data(), blocks.data(), blocks.size());
  const Tensor from = m.holding({static_cast<std::int64_t>(bytes.size())}, bytes);
  Tensor to = m.empty({static_cast<std::int64_t>(values.size())}, dtype_of<T>());
  m.kernels.dequantize(format, from, to);
  to = m.host(to);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(static_cast<float>(to.data<T>()[i]), static_cast<float>(T(values[i])))
        << tensor::name_of(format) << ", element " << i << " on " << m.name();
}

TEST(StoredFormats, KernelsGiveTheValuesRoundedOnce) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const StoredFormat format : every_format)
    for (const std::size_t blocks_there : {1, 37, 300}) {
      const auto count = blocks_there * static_cast<std::size_t>(block_size(format).elements);
      if (count > 1 << 17) continue;
      std::vector<float> values(count);
      for (float& value : values) value = normal(random);
      const auto blocks = blocks_of(format, values);
      values = values_in(format, blocks, count);
      for (const auto& machine : all_machines()) {
        expect_values<float>(*machine, format, blocks, values);
        expect_values<bf16>(*machine, format, blocks, values);
        expect_values<f16>(*machine, format, blocks, values);
        if (HasFatalFailure()) return;
      }
    }
}

/// Blocks of one scale each, whose bytes count up, begun at any byte.
std::vector<std::byte> blocks_of_every_code(std::int64_t block, const std::vector<float>& scales) {
  std::vector<std::byte> out;
  for (const float scale : scales)
    for (std::int64_t first = 0; first < 256; first += block) {
      for (std::int64_t k = 0; k < block; ++k) out.push_back(static_cast<std::byte>(first + k));
      out.resize(out.size() + sizeof scale);
      std::memcpy(out.data() + out.size() - sizeof scale, &scale, sizeof scale);
    }
  return out;
}

/// Scales may be any number: of files that others wrote, too.
TEST(StoredFormats, EveryCodeOfAByteUnderAnyScale) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> scales{0x1.9p-116f,
                            0x1.fffffep-117f,
                            0x1p-117f,
                            0x1.8p118f,
                            0x1.fffffep118f,
                            0x1p119f,
                            0x1.4p120f,
                            -3.0f,
                            0.0f,
                            infinity,
                            std::bit_cast<float>(0x7fffffffu)};
  std::mt19937 random(5);
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f);
  for (int exponent = -116; exponent < 119; exponent += 5)
    scales.push_back(std::ldexp(mantissa(random), exponent));
  const auto e4m3 = [](int code) {
    const int exponent = code >> 3 & 15, digits = code & 7;
    if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const float size =
        std::ldexp(static_cast<float>(exponent ? 8 + digits : digits), std::max(exponent, 1) - 10);
    return code & 0x80 ? -size : size;
  };
  for (const StoredFormat format : {StoredFormat::fp8, StoredFormat::int8}) {
    const bool fp8 = format == StoredFormat::fp8;
    const auto blocks = blocks_of_every_code(fp8 ? 128 : 64, scales);
    std::vector<std::uint8_t> bytes(blocks.size());
    std::memcpy(bytes.data(), blocks.data(), blocks.size());
    for (const auto& m : all_machines()) {
      Tensor to = m->empty({std::ssize(scales) * 256}, DType::bf16);
      m->kernels.dequantize(format, m->holding({std::ssize(bytes)}, bytes), to);
      to = m->host(to);
      for (std::size_t i = 0; i < scales.size() * 256; ++i) {
        const int code = static_cast<int>(i % 256);
        const float number = fp8 ? e4m3(code) : static_cast<float>(static_cast<std::int8_t>(code));
        const float wanted = static_cast<float>(bf16(number * scales[i / 256])),
                    got = static_cast<float>(to.data<bf16>()[i]);
        ASSERT_TRUE(std::isnan(wanted) ? std::isnan(got)
                                       : got == wanted && std::signbit(got) == std::signbit(wanted))
            << tensor::name_of(format) << " " << code << " times " << scales[i / 256] << ": " << got
            << " for " << wanted << " on " << m->name();
      }
    }
  }
}

/// Which processors write past their caches.
TEST(StoredFormats, LargeResultsAreTheSame) {
  constexpr std::int64_t block = 16384, most = 9 << 20, small = 4 * block;
  for (const CpuIsa isa : {CpuIsa::portable, CpuIsa::avx2, CpuIsa::avx512}) {
    if (isa > cpu_isa()) continue;
    Machine m(isa, 2);
    for (const StoredFormat format : {StoredFormat::int8, StoredFormat::nf4, StoredFormat::nf4_double,
                                      StoredFormat::mxfp4, StoredFormat::fp8})
      for (const DType dtype : {DType::bf16, DType::f32}) {
        const auto blocks = blocks_of(format, random_values(small, -20, 20));
        const Tensor few = m.empty({small}, dtype), all = m.empty({most}, dtype),
                     from = m.empty({stored_bytes(format, most)}, DType::u8);
        for (std::int64_t at = 0; at < from.numel(); at += std::ssize(blocks))
          std::memcpy(from.raw() + at, blocks.data(),
                      std::min(blocks.size(), static_cast<std::size_t>(from.numel() - at)));
        m.kernels.dequantize(format, from.range(0, std::ssize(blocks)), few);
        m.kernels.dequantize(format, from, all);
        for (std::int64_t at = 0; at < most; at += small) {
          const std::size_t bytes = static_cast<std::size_t>(std::min(small, most - at)) * size_of(dtype);
          ASSERT_EQ(std::memcmp(all.range(at, most).raw(), few.raw(), bytes), 0)
              << tensor::name_of(format) << " in " << name_of(dtype) << ", element " << at;
        }
      }
  }
}

/// The bits are those of the same product with values that were made before, for rows that begin and end amid
/// blocks, tiles of one or many rows, and several threads.
TEST(StoredFormats, FewRowsAreMultipliedByBlocks) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    if (!m.kernels.multiplies_stored()) continue;
    SCOPED_TRACE(m.name());
    for (const StoredFormat format : every_format)
      for (const auto& [rows, n, k] : {std::array<std::int64_t, 3>{1, 1, 1},
                                       {1, 70, 33},
                                       {2, 301, 64},
                                       {19, 131, 96},
                                       {1, 5, 20000},
                                       {3, 37, 1000}}) {
        const auto blocks = blocks_of(format, random_values(static_cast<std::size_t>(n * k), -3, 3));
        std::vector<std::uint8_t> codes(blocks.size());
        std::memcpy(codes.data(), blocks.data(), blocks.size());
        const Tensor from = m.holding({std::ssize(codes)}, codes);
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          const Tensor made =
              m.empty({from.numel() / block_size(format).bytes * block_size(format).elements}, dtype);
          m.kernels.dequantize(format, from, made);
          const auto multiply = [&](tensor::Matmul args) {
            args.a = m.of({rows, k}, dtype, normals_in(dtype, rows * k, 1));
            args.bias = m.of({n}, dtype, normals_in(dtype, n, 2));
            args.c = m.empty({rows, n}, dtype), args.pre_activation = m.empty({rows, n}, dtype);
            args.trans_b = args.few_rows = true;
            args.activation = tensor::Activation::gelu_tanh;
            m.kernels.matmul(args);
            return std::pair(bytes(m, args.pre_activation), bytes(m, args.c));
          };
          ASSERT_TRUE(multiply({.stored_b = {from, format, n, k}}) ==
                      multiply({.b = made.range(0, n * k).reshape({n, k})}))
              << tensor::name_of(format) << ", " << rows << " x " << n << " x " << k << " in "
              << name_of(dtype);
        }
      }
    const Tensor a = m.empty({1, 64}, DType::bf16), c = m.empty({1, 2}, DType::bf16),
                 blocks = m.empty({136}, DType::u8);
    const tensor::StoredMatrix matrix{blocks, StoredFormat::int8, 2, 64};
    expect_error(ErrorKind::usage, "few rows alone are multiplied by blocks",
                 [&] { m.kernels.matmul({.a = a, .c = c, .trans_b = true, .stored_b = matrix}); });
    expect_error(ErrorKind::usage, "bytes are not the int8 blocks of 3 rows of 64", [&] {
      m.kernels.matmul({.a = a,
                        .c = c,
                        .trans_b = true,
                        .few_rows = true,
                        .stored_b = {blocks, StoredFormat::int8, 3, 64}});
    });
    expect_error(ErrorKind::usage, "rows of b have 64 elements", [&] {
      m.kernels.matmul({.a = m.empty({1, 63}, DType::bf16),
                        .c = c,
                        .trans_b = true,
                        .few_rows = true,
                        .stored_b = matrix});
    });
  }
}

TEST(StoredFormats, KernelsCheckTheirArguments) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor blocks = m.empty({68}, DType::u8);
    constexpr auto int8 = StoredFormat::int8;
    expect_error(ErrorKind::usage, "are not the int8 blocks of",
                 [&] { m.kernels.dequantize(int8, blocks, m.empty({128}, DType::bf16)); });
    expect_error(ErrorKind::usage, "are not the nf4 blocks of",
                 [&] { m.kernels.dequantize(StoredFormat::nf4, blocks, m.empty({64}, DType::bf16)); });
    expect_error(ErrorKind::usage, "must be uint8",
                 [&] { m.kernels.dequantize(int8, m.empty({68}, DType::u16), m.empty({64}, DType::bf16)); });
    expect_error(ErrorKind::usage, "not fp64",
                 [&] { m.kernels.dequantize(int8, blocks, m.empty({64}, DType::f64)); });
  }
}

}  // namespace
}  // namespace sherd::test
