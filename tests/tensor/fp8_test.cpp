// FP8 against its definition: each number becomes the nearest of the 256 that a format has, found by trying
// them all in double; scales against the published formula (DeepSeek-V3.1's with scales of powers of two).
// References of PyTorch: scripts/references/make_fp8_reference.py.
#include "tensor/formats/fp8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "base/crc32c.h"
#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/extents.h"
#include "tensor/fp8_reference.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::Fp8Format;
using tensor::Fp8Matrix;
using tensor::Fp8Range;
using tensor::Fp8Rule;
using tensor::Fp8Scaling;

constexpr double infinite = std::numeric_limits<double>::infinity();

/// The value of a code, computed field by field.
double number_of(Fp8Format format, int code) {
  const bool wide = format == Fp8Format::e4m3;
  const int mantissa_bits = wide ? 3 : 2, bias = wide ? 7 : 15;
  const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const double sign = code & 0x80 ? -1 : 1;
  if (wide && (code & 0x7f) == 0x7f) return std::nan("");
  if (!wide && exponent == 31) return mantissa ? std::nan("") : sign * infinite;
  const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}
double largest_of(Fp8Format format) {
  return format == Fp8Format::e4m3 ? 448 : 57344;
}

/// The nearest code, of two as near the even one; what is beyond the largest becomes the largest.
int nearest_code(Fp8Format format, double x) {
  if (std::isnan(x)) return 0x7f;
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (std::isinf(x)) return (format == Fp8Format::e4m3 ? 0x7f : 0x7c) | sign;
  int best = 0;
  for (int code = 0; code < 0x7f && std::isfinite(number_of(format, code)); ++code) {
    const double off = std::abs(number_of(format, code) - std::abs(x)),
                 least = std::abs(number_of(format, best) - std::abs(x));
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return best | sign;
}

/// The magnitude by which the codes of a block are scaled: 2^⌈log2(largest/448)⌉.
double scale_for(Fp8Format format, double largest) {
  if (largest == 0) return 0x1p-60;
  return std::max(0x1p-60, std::exp2(std::ceil(std::log2(largest / largest_of(format)))));
}

constexpr Fp8Scaling scalings[] = {Fp8Scaling::tensor, Fp8Scaling::rows, Fp8Scaling::blocks_1x128,
                                   Fp8Scaling::blocks_128x128};
constexpr Fp8Format formats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

/// The scale of an element by cuBLASLt's layouts.
std::int64_t place_of(Fp8Scaling scaling, std::int64_t rows, std::int64_t cols, std::int64_t r,
                      std::int64_t c) {
  switch (scaling) {
    case Fp8Scaling::rows:
      return r;
    case Fp8Scaling::blocks_1x128:
      return c / 128 * ((rows + 15) / 16 * 16) + r;
    case Fp8Scaling::blocks_128x128:
      return r / 128 * (((cols + 127) / 128 + 3) / 4 * 4) + c / 128;
    default:
      return 0;
  }
}

struct Quantised {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  std::int64_t lost[2];
};

Quantised quantised(Machine& m, const Tensor& x, bool transposed, Fp8Rule rule) {
  const std::int64_t rows = x.shape().rows(), cols = x.shape().back();
  const Fp8Matrix to =
      transposed ? empty_fp8(*m.device, rule, cols, rows) : empty_fp8(*m.device, rule, rows, cols);
  const Tensor lost = m.holding<std::int64_t>({2}, {5, 7});
  m.kernels.to_fp8(x, transposed, to, lost);
  Quantised out;
  const Tensor codes = m.host(to.codes), scales = m.host(to.scales), counts = m.host(lost);
  out.codes.assign(codes.data<std::uint8_t>(), codes.data<std::uint8_t>() + codes.numel());
  out.scales.assign(scales.data<float>(), scales.data<float>() + scales.numel());
  out.lost[0] = counts.data<std::int64_t>()[0] - 5, out.lost[1] = counts.data<std::int64_t>()[1] - 7;
  return out;
}

/// Numbers of several sizes, with zeros, and outliers; where `wild` also what is not finite.
std::vector<double> numbers(std::int64_t count, std::uint32_t seed, bool wild) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<float>(normal(random) * std::exp2(static_cast<double>(i / 97 % 40) - 30));
    if (i % 211 == 5) out[i] = 0;
    if (i % 401 == 17) out[i] *= 1e6;
    if (wild && i % 997 == 3) out[i] = i % 2 ? infinite : -infinite;
    if (wild && i % 1009 == 3) out[i] = std::nan("");
  }
  return out;
}

/// Every code, scale and count of what the machine made of x.
void expect_quantised(Machine& m, const Tensor& x, bool transposed, Fp8Rule rule) {
  const Tensor given = m.host(x);
  const std::vector<double> values = values_of(given);
  // By its bits: this thread may take subnormal numbers for zeros.
  const auto is_zero = [&](std::int64_t i) {
    const auto width = static_cast<std::int64_t>(size_of(given.dtype()));
    const auto* from = reinterpret_cast<const unsigned char*>(given.raw()) + i * width;
    unsigned bits = from[width - 1] & 0x7fu;
    for (std::int64_t k = 0; k + 1 < width; ++k) bits |= from[k];
    return bits == 0;
  };
  const std::int64_t in_rows = x.shape().rows(), in_cols = x.shape().back();
  const std::int64_t rows = transposed ? in_cols : in_rows, cols = transposed ? in_rows : in_cols;
  const auto at = [&](std::int64_t r, std::int64_t c) {
    return values[static_cast<std::size_t>(transposed ? c * in_cols + r : r * in_cols + c)];
  };
  const Quantised got = quantised(m, x, transposed, rule);
  std::vector<double> largest(got.scales.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) {
      double& most = largest[static_cast<std::size_t>(place_of(rule.scaling, rows, cols, r, c))];
      if (std::isfinite(at(r, c))) most = std::max(most, std::abs(at(r, c)));
    }
  for (std::size_t i = 0; i < largest.size(); ++i)
    ASSERT_EQ(got.scales[i], scale_for(rule.format, largest[i])) << "scale " << i << " on " << m.name();
  const std::int64_t stride = (cols + 15) / 16 * 16, padded = (rows + 15) / 16 * 16;
  ASSERT_EQ(std::ssize(got.codes), stride * padded);
  std::int64_t not_finite = 0, to_zero = 0;
  for (std::int64_t r = 0; r < padded; ++r)
    for (std::int64_t c = 0; c < stride; ++c) {
      const int code = got.codes[static_cast<std::size_t>(r * stride + c)];
      if (r >= rows || c >= cols) {
        ASSERT_EQ(code, 0) << "padding at " << r << ", " << c << " on " << m.name();
        continue;
      }
      const double x_rc = at(r, c);
      const float scale = got.scales[static_cast<std::size_t>(place_of(rule.scaling, rows, cols, r, c))];
      const int want = nearest_code(rule.format, x_rc / scale);
      ASSERT_EQ(code & 0x7f, want & 0x7f) << x_rc << " over " << scale << " on " << m.name();
      if ((want & 0x7f) != 0x7f) {
        ASSERT_EQ(code, want) << x_rc << " on " << m.name();
      }
      not_finite += !std::isfinite(x_rc);
      to_zero += !is_zero(transposed ? c * in_cols + r : r * in_cols + c) && (want & 0x7f) == 0;
    }
  EXPECT_EQ(got.lost[0], not_finite) << m.name();
  EXPECT_EQ(got.lost[1], to_zero) << m.name();
}

TEST(Fp8, EveryBf16BecomesTheNearestNumber) {
  std::vector<bf16> all(65536);
  for (int i = 0; i < 65536; ++i) all[static_cast<std::size_t>(i)].bits = static_cast<std::uint16_t>(i);
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    // Rows of numbers of one size, each with its scale, and all of them with that of the largest.
    const Tensor x = m.holding({512, 128}, all);
    for (const Fp8Format format : formats)
      for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::rows})
        ASSERT_NO_FATAL_FAILURE(expect_quantised(m, x, false, {format, scaling}));
  }
}

/// PyTorch's casts where the rules are the same: of what is finite and does not round beyond the largest.
TEST(Fp8, CastsArePyTorchs) {
  namespace reference = fp8_reference;
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    for (const Fp8Format format : formats) {
      const bool wide = format == Fp8Format::e4m3;
      // With a first column of the largest number each row's scale is one, or the row is left out.
      std::vector<bf16> all;
      for (int i = 0; i < 65536; ++i) {
        bf16 x;
        x.bits = static_cast<std::uint16_t>(i);
        if (std::isfinite(static_cast<float>(x)) && std::abs(static_cast<float>(x)) < (wide ? 464 : 61440))
          all.push_back(x);
      }
      std::vector<double> pairs;
      for (const bf16 x : all) pairs.push_back(largest_of(format)), pairs.push_back(static_cast<float>(x));
      const auto count = std::ssize(all);
      const Quantised got =
          quantised(m, m.of({count, 2}, DType::f32, pairs), false, {format, Fp8Scaling::rows});
      std::vector<std::uint8_t> codes;
      for (std::int64_t i = 0; i < count; ++i) {
        const bool above =
            std::abs(static_cast<float>(all[static_cast<std::size_t>(i)])) > largest_of(format);
        // Beyond the largest number, where it still rounds down to it, the scale is two.
        codes.push_back(above ? static_cast<std::uint8_t>((wide ? 0x7e : 0x7b) | (i * 2 >= count ? 0x80 : 0))
                              : got.codes[static_cast<std::size_t>(16 * i + 1)]);
      }
      EXPECT_EQ(count, wide ? reference::e4m3_count : reference::e5m2_count);
      EXPECT_EQ(crc32c(codes.data(), codes.size()), wide ? reference::e4m3 : reference::e5m2) << m.name();
    }
  }
}

/// Codes and scales by the formula that DeepSeek published, made by PyTorch.
TEST(Fp8, BlocksAreThoseOfThePublishedFormula) {
  namespace reference = fp8_reference;
  constexpr std::int64_t rows = reference::rows, cols = reference::cols;
  std::vector<double> values;
  for (std::uint32_t i = 0; i < rows * cols; ++i) {
    const std::uint32_t bits = i * 2654435761u;
    const double magnitude =
        (128 + bits / 256 % 128) / 128.0 * std::exp2(static_cast<int>(bits >> 20) % 32 - 20);
    values.push_back(bits >> 31 ? -magnitude : magnitude);
  }
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    for (const bool runs : {true, false}) {
      const Fp8Scaling scaling = runs ? Fp8Scaling::blocks_1x128 : Fp8Scaling::blocks_128x128;
      const Quantised got =
          quantised(m, m.of({rows, cols}, DType::bf16, values), false, {Fp8Format::e4m3, scaling});
      std::vector<std::uint8_t> codes, exponents;
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < cols; ++c) {
          codes.push_back(got.codes[static_cast<std::size_t>(r * tensor::fp8_padded(cols) + c)]);
          if (c % 128 == 0 && (runs || r % 128 == 0))
            exponents.push_back(static_cast<std::uint8_t>(
                128 + std::ilogb(got.scales[static_cast<std::size_t>(place_of(scaling, rows, cols, r, c))])));
        }
      EXPECT_EQ(crc32c(codes.data(), codes.size()), runs ? reference::runs_codes : reference::squares_codes)
          << m.name();
      EXPECT_EQ(crc32c(exponents.data(), exponents.size()),
                runs ? reference::runs_exponents : reference::squares_exponents)
          << m.name();
    }
  }
}

TEST(Fp8, BlocksHaveTheScalesOfTheFormulaInEveryLayout) {
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    const bool emulated = m.family == "emulator";
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {17, 129}, {130, 300}}) {
      if (emulated && rows > 100) continue;
      for (const Fp8Format format : formats)
        for (const Fp8Scaling scaling : scalings)
          for (const bool transposed : {false, true}) {
            const DType dtype = rows == 17 ? DType::f32 : rows == 1 ? DType::f16 : DType::bf16;
            const Tensor x = m.of({rows, cols}, dtype, numbers(rows * cols, 11, rows > 1));
            ASSERT_NO_FATAL_FAILURE(expect_quantised(m, x, transposed, {format, scaling}))
                << rows << " x " << cols << ", scaling " << static_cast<int>(scaling)
                << (transposed ? "ᵀ" : "");
          }
    }
  }
}

TEST(Fp8, AScaleIsTheLeastPowerOfTwoThatHoldsTheLargest) {
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    for (const double largest :
         {448.0, std::nextafter(448.0f, 1e9f) * 1.0, 449.0, 224.0, 1e-12, 0x1p-100, 3e38}) {
      const Tensor x = m.of({1, 2}, DType::f32, {largest, 0});
      const Quantised got = quantised(m, x, false, {Fp8Format::e4m3, Fp8Scaling::tensor});
      EXPECT_EQ(got.scales[0], scale_for(Fp8Format::e4m3, static_cast<float>(largest))) << largest;
    }
  }
}

/// Ranks that hold parts make of them what one makes of the whole.
TEST(Fp8, PartsWithAgreedScalesAreThoseOfTheWhole) {
  constexpr std::int64_t rows = 150, cols = 272;
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::blocks_128x128}) {
      const Fp8Rule rule{Fp8Format::e4m3, scaling};
      const Tensor x = m.of({rows, cols}, DType::bf16, numbers(rows * cols, 3, false));
      const Fp8Matrix whole = empty_fp8(*m.device, rule, rows, cols);
      m.kernels.to_fp8(x, false, whole, {});
      const Tensor scales = m.empty(whole.scales.shape(), DType::f32),
                   codes = m.empty({rows * cols}, DType::u8), values = m.empty({rows * cols}, DType::bf16);
      m.kernels.fill(scales, 0);
      const std::int64_t cuts[] = {0, 1, 1000, 20000, 20000, rows * cols};
      const auto for_parts = [&](const auto& body) {
        for (int i = 0; i < 5; ++i) body(Fp8Range{rows, cols, cuts[i], cuts[i + 1]});
      };
      const auto part = [](const Tensor& of, const Fp8Range& range) {
        return of.range(range.begin, range.end);
      };
      for_parts([&](const Fp8Range& range) { m.kernels.fp8_largest(part(x, range), range, rule, scales); });
      m.kernels.fp8_scales(rule.format, scales);
      EXPECT_EQ(bytes(m, scales), bytes(m, whole.scales)) << m.name();
      for_parts([&](const Fp8Range& range) {
        m.kernels.fp8_encode(part(x, range), range, rule, scales, part(codes, range));
      });
      // Another cut on the way back.
      for (const Fp8Range& range : {Fp8Range{rows, cols, 0, 777}, {rows, cols, 777, rows * cols}})
        m.kernels.fp8_decode(part(codes, range), range, rule, scales, part(values, range));
      const Tensor own = m.host(codes), of_whole = m.host(whole.codes), back = m.host(values),
                   given = m.host(x);
      for (std::int64_t i = 0; i < rows * cols; ++i) {
        const std::int64_t r = i / cols, c = i % cols;
        const int code = own.data<std::uint8_t>()[i];
        ASSERT_EQ(code, of_whole.data<std::uint8_t>()[r * cols + c]) << m.name() << " element " << i;
        const float scale = m.host(scales).data<float>()[place_of(scaling, rows, cols, r, c)];
        if (i % 61 == 0) {
          ASSERT_EQ(static_cast<float>(back.data<bf16>()[i]), number_of(rule.format, code) * scale)
              << m.name();
        }
      }
      // Values that came back become the same numbers again, though blocks whose largest was rounded down may
      // have smaller scales.
      const Fp8Matrix again = empty_fp8(*m.device, rule, cols, rows),
                      before = empty_fp8(*m.device, rule, cols, rows);
      m.kernels.to_fp8(values.reshape({rows, cols}), true, again, {});
      m.kernels.to_fp8(x, true, before, {});
      const auto number_at = [&](const Fp8Matrix& of, std::int64_t r, std::int64_t c) {
        return number_of(rule.format,
                         m.host(of.codes).data<std::uint8_t>()[r * tensor::fp8_padded(rows) + c]) *
               m.host(of.scales).data<float>()[place_of(scaling, cols, rows, r, c)];
      };
      for (std::int64_t i = 0; i < rows * cols; i += 137)
        ASSERT_EQ(number_at(again, i / rows, i % rows), number_at(before, i / rows, i % rows)) << m.name();
    }
  }
}

/// One rounding of the result, and the error of sums in fp32.
TEST(Fp8, ProductsAreThoseOfTheNumbers) {
  struct Pair {
    Fp8Rule a, b;
  };
  using enum Fp8Format;
  const Pair pairs[] = {{{e4m3, Fp8Scaling::tensor}, {e4m3, Fp8Scaling::tensor}},
                        {{e5m2, Fp8Scaling::tensor}, {e4m3, Fp8Scaling::tensor}},
                        {{e4m3, Fp8Scaling::rows}, {e4m3, Fp8Scaling::rows}},
                        {{e4m3, Fp8Scaling::blocks_1x128}, {e4m3, Fp8Scaling::blocks_128x128}},
                        {{e4m3, Fp8Scaling::blocks_1x128}, {e4m3, Fp8Scaling::blocks_1x128}}};
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    for (const Pair& pair : pairs)
      for (const auto& [rows, cols, depth] :
           {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 16, 16}, {33, 48, 160}, {20, 144, 272}}) {
        const Tensor a = m.of({rows, depth}, DType::bf16, numbers(rows * depth, 1, false)),
                     b = m.of({cols, depth}, DType::bf16, numbers(cols * depth, 2, false));
        const Fp8Matrix fp8_a = empty_fp8(*m.device, pair.a, rows, depth),
                        fp8_b = empty_fp8(*m.device, pair.b, cols, depth);
        m.kernels.to_fp8(a, false, fp8_a, {}), m.kernels.to_fp8(b, false, fp8_b, {});
        const Tensor c = m.empty({rows, cols}, DType::f32);
        m.kernels.matmul({.c = c, .fp8_a = fp8_a, .fp8_b = fp8_b});
        const auto numbers_of = [&](const Fp8Matrix& of) {
          const Tensor codes = m.host(of.codes), scales = m.host(of.scales);
          std::vector<double> out;
          for (std::int64_t r = 0; r < of.rows; ++r)
            for (std::int64_t k = 0; k < of.cols; ++k)
              out.push_back(
                  number_of(of.rule.format, codes.data<std::uint8_t>()[r * tensor::fp8_padded(of.cols) + k]) *
                  scales.data<float>()[place_of(of.rule.scaling, of.rows, of.cols, r, k)]);
          return out;
        };
        const std::vector<double> left = numbers_of(fp8_a), right = numbers_of(fp8_b),
                                  got = values_of(m.host(c));
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t j = 0; j < cols; ++j) {
            double sum = 0, magnitude = 0;
            for (std::int64_t k = 0; k < depth; ++k) {
              const double term = left[static_cast<std::size_t>(i * depth + k)] *
                                  right[static_cast<std::size_t>(j * depth + k)];
              sum += term, magnitude += std::abs(term);
            }
            ASSERT_NEAR(got[static_cast<std::size_t>(i * cols + j)], sum,
                        0x1p-24 * (std::abs(sum) + (4 + std::sqrt(double(depth))) * magnitude))
                << m.name() << " at " << i << ", " << j;
          }
      }
  }
}

/// On processors they have the bits of products of bf16, whatever follows.
TEST(Fp8, OnProcessorsProductsHaveTheBitsOfThoseInBf16) {
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    if (m.family != "cpu") continue;
    constexpr std::int64_t rows = 70, cols = 96, depth = 400;
    const Fp8Rule rule{Fp8Format::e4m3, Fp8Scaling::blocks_1x128};
    const auto operand = [&](std::int64_t n, std::uint32_t seed, Tensor& plain) {
      const Fp8Matrix made = empty_fp8(*m.device, rule, n, depth);
      m.kernels.to_fp8(m.of({n, depth}, DType::bf16, numbers(n * depth, seed, false)), false, made, {});
      std::vector<double> values;
      for (std::int64_t r = 0; r < n; ++r)
        for (std::int64_t k = 0; k < depth; ++k)
          values.push_back(number_of(rule.format, made.codes.data<std::uint8_t>()[r * depth + k]) *
                           made.scales.data<float>()[place_of(rule.scaling, n, depth, r, k)]);
      plain = m.of({n, depth}, DType::bf16, values);
      return made;
    };
    Tensor a, b;
    const Fp8Matrix fp8_a = operand(rows, 5, a), fp8_b = operand(cols, 6, b);
    const Tensor bias = m.of({cols}, DType::bf16, numbers(cols, 7, false));
    for (const bool follows : {false, true}) {
      const DType to = follows ? DType::bf16 : DType::f32;
      const Tensor c = m.of({rows, cols}, to, numbers(rows * cols, 8, false)),
                   d = m.of({rows, cols}, to, numbers(rows * cols, 8, false));
      const auto multiply = [&](tensor::Matmul product) {
        if (follows)
          product.bias = bias, product.activation = tensor::Activation::gelu_tanh;
        else
          product.accumulate = true, product.fold = DType::bf16;
        m.kernels.matmul(product);
      };
      multiply({.c = c, .fp8_a = fp8_a, .fp8_b = fp8_b});
      multiply({.a = a, .b = b, .c = d, .trans_b = true});
      EXPECT_EQ(bytes(m, c), bytes(m, d)) << m.name();
    }
  }
}

TEST(Fp8, WrongArgumentsAreRefused) {
  const auto machines = one_of_each();
  if (machines.empty()) GTEST_SKIP() << "no GPU";
  Machine& m = *machines.front();
  const Fp8Rule scalar{Fp8Format::e4m3, Fp8Scaling::tensor}, gradient{Fp8Format::e5m2, Fp8Scaling::tensor},
      squares{Fp8Format::e4m3, Fp8Scaling::blocks_128x128};
  const auto matrix = [&](Fp8Rule rule, std::int64_t rows, std::int64_t cols) {
    return empty_fp8(*m.device, rule, rows, cols);
  };
  const Tensor x = m.empty({4, 32}, DType::bf16), c = m.empty({4, 8}, DType::f32);
  expect_error(ErrorKind::usage, "is not a matrix of",
               [&] { m.kernels.to_fp8(x, true, matrix(scalar, 4, 32), {}); });
  expect_error(ErrorKind::usage, "not fp64", [&] {
    m.kernels.to_fp8(m.empty({4, 32}, DType::f64), false, matrix(scalar, 4, 32), {});
  });
  expect_error(ErrorKind::usage, "`lost` must be",
               [&] { m.kernels.to_fp8(x, false, matrix(scalar, 4, 32), x); });
  const auto refused = [&](const char* why, const Fp8Matrix& a, const Fp8Matrix& b, const Tensor& to) {
    expect_error(ErrorKind::usage, why, [&] { m.kernels.matmul({.c = to, .fp8_a = a, .fp8_b = b}); });
  };
  refused("differ", matrix(scalar, 4, 32), matrix(scalar, 8, 48), c);
  refused("must be E4M3", matrix(gradient, 4, 32), matrix(gradient, 8, 32), c);
  refused("which one's may be 128 x 128", matrix(squares, 4, 32), matrix(squares, 8, 32), c);
  refused("must hold", matrix(scalar, 4, 32), matrix(scalar, 8, 32), m.empty({4, 9}, DType::f32));
  refused("must be bf16 or fp32", matrix(scalar, 4, 32), matrix(scalar, 8, 32), m.empty({4, 8}, DType::f16));
  expect_error(ErrorKind::usage, "come alone", [&] {
    m.kernels.matmul({.a = x, .c = c, .fp8_a = matrix(scalar, 4, 32), .fp8_b = matrix(scalar, 8, 32)});
  });
  expect_error(ErrorKind::usage, "blocks of 128 x 128", [&] {
    m.kernels.fp8_largest(x, {4, 32, 0, 128}, {Fp8Format::e4m3, Fp8Scaling::rows}, m.empty({4}, DType::f32));
  });
  expect_error(ErrorKind::usage, "is not elements", [&] {
    m.kernels.fp8_encode(x, {4, 32, 0, 127}, scalar, m.empty({1}, DType::f32), m.empty({128}, DType::u8));
  });
}

}  // namespace
}  // namespace sherd::test
