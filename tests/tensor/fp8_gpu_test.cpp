// FP8 on GPUs: codes and scales are the processor's to the bit; products are those of what the codes stand
// for.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/formats/fp8.h"

namespace sherd::tensor {
namespace {

using Count = std::int64_t;
using sherd::testing::expect_error;
using test::Machine;

/// A processor's machines of the fewest and the most lanes, and all others.
std::vector<std::unique_ptr<Machine>> few_machines() {
  std::vector<std::unique_ptr<Machine>> out = test::all_machines();
  std::size_t cpus = 0, seen = 0;
  for (const auto& m : out) cpus += m->family == "cpu";
  std::erase_if(out, [&](const std::unique_ptr<Machine>& m) {
    return m->family == "cpu" && ++seen != 1 && seen != cpus;
  });
  return out;
}

/// Runs of numbers of every size, with all that is special among them.
std::vector<double> odd_numbers(Count n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const double inf = std::numeric_limits<double>::infinity(),
               special[] = {0.0,    -0.0,   inf, -inf, std::nan(""), -std::nan(""), 1e-40,
                            -1e-45, 3.4e38, 448, -464, 57344,        61440,         0x1p-9};
  std::vector<double> out(static_cast<std::size_t>(n));
  double size = 1;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i % 61 == 0) size = std::ldexp(1.0, static_cast<int>(random() % 50) - 30);
    out[i] = i % 610 < 61 ? 0 : normal(random) * size;
    if (random() % 40 == 0) out[i] = special[random() % std::size(special)];
  }
  return out;
}

/// Room for a matrix, filled with what no kernel may leave there.
Fp8Matrix soiled(Machine& m, Fp8Rule rule, Count rows, Count cols) {
  const Shape codes{fp8_padded(rows), fp8_padded(cols)}, scales = fp8_scales_shape(rule.scaling, rows, cols);
  return {m.holding(codes, std::vector<std::uint8_t>(static_cast<std::size_t>(codes.numel()), 0xaa)),
          m.holding(scales, std::vector<float>(static_cast<std::size_t>(scales.numel()), -1)), rule, rows,
          cols};
}

/// A tensor of these elements that begins at the memory's element `first`.
Tensor beginning_at(Machine& m, DType dtype, std::vector<double> values, Count first) {
  const auto n = static_cast<Count>(values.size());
  values.insert(values.begin(), static_cast<std::size_t>(first), 1e30);
  return m.of({first + n}, dtype, values).rows(first, first + n);
}

constexpr Fp8Format formats[] = {Fp8Format::e4m3, Fp8Format::e5m2};
constexpr Fp8Scaling scalings[] = {Fp8Scaling::tensor, Fp8Scaling::rows, Fp8Scaling::blocks_1x128,
                                   Fp8Scaling::blocks_128x128};

class Fp8OnGpu : public ::testing::TestWithParam<DType> {
 protected:
  void expect_alike(Fp8Rule rule, bool transposed, Count rows, Count cols, Count first) {
    SCOPED_TRACE(cat(rows, " x ", cols, transposed ? " transposed" : "", ", format ",
                     static_cast<int>(rule.format), ", scaling ", static_cast<int>(rule.scaling), ", from ",
                     first));
    const std::vector<double> values = odd_numbers(rows * cols, static_cast<std::uint64_t>(rows + cols));
    test::on_machines(
        few_machines(),
        [&](Machine& m) {
          const Tensor x = beginning_at(m, GetParam(), values, first)
                               .reshape(transposed ? Shape{cols, rows} : Shape{rows, cols});
          const Fp8Matrix to = soiled(m, rule, rows, cols), again = soiled(m, rule, rows, cols);
          const Tensor lost = m.holding({2}, std::vector<std::int64_t>{5, 1'000'000'000'000});
          m.kernels.to_fp8(x, transposed, to, lost);
          m.kernels.to_fp8(x, transposed, again, {});
          EXPECT_EQ(test::bytes(m, again.codes), test::bytes(m, to.codes));
          return std::vector<Tensor>{to.codes, to.scales, lost};
        },
        [&](const std::vector<Tensor>& got) {
          // Enough to see that something was done: codes behind the columns, counts of what is not finite.
          for (Count r = 0; r < fp8_padded(rows); ++r)
            for (Count c = 0; c < fp8_padded(cols); ++c) {
              if (r < rows && c < cols) continue;
              ASSERT_EQ(got[0].data<std::uint8_t>()[r * fp8_padded(cols) + c], 0) << r << ", " << c;
            }
          Count not_finite = 0;
          for (const double value : values) not_finite += !std::isfinite(test::rounded(value, GetParam()));
          EXPECT_EQ(got[2].data<std::int64_t>()[0], 5 + not_finite);
        },
        test::Alike::to_the_bit);
  }
};

TEST_P(Fp8OnGpu, MatricesAreTheProcessorsToTheBit) {
  Count turn = 0;
  for (const Fp8Format format : formats)
    for (const Fp8Scaling scaling : scalings)
      for (const bool transposed : {false, true}) {
        // Rows that packs fit, and in turn others.
        const Count sizes[][3] = {{1, 1, 0}, {17, 129, 0}, {130, 300, 1}, {131, 520, 0}, {260, 16, 0}};
        expect_alike({format, scaling}, transposed, 24, 136, 0);
        const auto& [rows, cols, first] = sizes[turn++ % 5];
        expect_alike({format, scaling}, transposed, rows, cols, first);
        if (HasFailure()) return;
      }
}

/// Matrices without a finite number, of zeros alone, and of numbers that are all too small or too large for
/// the format.
TEST_P(Fp8OnGpu, MatricesOfOneKindAreTheProcessorsToTheBit) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double value : {0.0, inf, std::nan(""), 1e-42, 1e-20, 3e38, 1.75, 1.7500001})
    for (const Fp8Scaling scaling : scalings)
      test::on_machines(
          few_machines(),
          [&](Machine& m) {
            const Fp8Matrix to = soiled(m, {Fp8Format::e4m3, scaling}, 3, 20);
            const Tensor x = m.of({3, 20}, GetParam(), std::vector<double>(60, value)),
                         lost = m.holding({2}, std::vector<std::int64_t>{0, 0});
            m.kernels.to_fp8(x, false, to, lost);
            return std::vector<Tensor>{to.codes, to.scales, lost};
          },
          [](const std::vector<Tensor>&) {}, test::Alike::to_the_bit);
}

/// Ranks that hold parts of a matrix find together the scales of the whole, and its codes.
TEST_P(Fp8OnGpu, PartsOfAMatrixGiveTheCodesOfTheWhole) {
  const Count rows = 131;
  for (const Count cols : {Count{296}, Count{301}})
    for (const Fp8Format format : formats)
      for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::blocks_128x128}) {
        SCOPED_TRACE(cat(cols, " columns, format ", static_cast<int>(format), ", scaling ",
                         static_cast<int>(scaling)));
        const Fp8Rule rule{format, scaling};
        const Count n = rows * cols, cuts[] = {0, 8, 8, 128 * cols + 7, 129 * cols - 3, 129 * cols + 40, n};
        const std::vector<double> values = odd_numbers(n, 3);
        test::on_machines(
            few_machines(),
            [&](Machine& m) {
              const Shape shape = fp8_scales_shape(scaling, rows, cols);
              const Tensor scales =
                  m.holding(shape, std::vector<float>(static_cast<std::size_t>(shape.numel())));
              const Fp8Matrix whole = soiled(m, rule, rows, cols);
              m.kernels.to_fp8(m.of({rows, cols}, GetParam(), values), false, whole, {});
              std::vector<Tensor> parts, out{whole.codes, whole.scales, scales};
              for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
                parts.push_back(m.of({cuts[i + 1] - cuts[i]}, GetParam(),
                                     {values.begin() + cuts[i], values.begin() + cuts[i + 1]}));
                m.kernels.fp8_largest(parts.back(), {rows, cols, cuts[i], cuts[i + 1]}, rule, scales);
              }
              m.kernels.fp8_scales(format, scales);
              for (std::size_t i = 0; i < parts.size(); ++i) {
                const Fp8Range range{rows, cols, cuts[i], cuts[i + 1]};
                const Tensor codes = m.empty(parts[i].shape(), DType::u8),
                             values_again = m.empty(parts[i].shape(), GetParam());
                m.kernels.fp8_encode(parts[i], range, rule, scales, codes);
                m.kernels.fp8_decode(codes, range, rule, scales, values_again);
                out.push_back(codes), out.push_back(values_again);
              }
              return out;
            },
            [&](const std::vector<Tensor>& got) {
              EXPECT_EQ(std::memcmp(got[1].raw(), got[2].raw(), got[1].bytes()), 0) << "scales";
              for (std::size_t i = 0; i + 1 < std::size(cuts); ++i)
                for (Count at = cuts[i]; at < cuts[i + 1]; ++at)
                  ASSERT_EQ(got[3 + 2 * i].data<std::uint8_t>()[at - cuts[i]],
                            got[0].data<std::uint8_t>()[at / cols * fp8_padded(cols) + at % cols])
                      << at;
            },
            test::Alike::to_the_bit);
        if (HasFailure()) return;
      }
}

TEST_P(Fp8OnGpu, EveryCodeIsReadAsOnTheProcessor) {
  std::vector<std::uint8_t> all(256);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i);
  for (const Fp8Format format : formats)
    for (const float scale : {0x1p-60f, 1.0f, 0x1p-8f, 0x1p119f})
      test::on_machines(
          few_machines(),
          [&](Machine& m) {
            const Tensor out = m.empty({256}, GetParam());
            m.kernels.fp8_decode(m.holding({256}, all), {2, 128, 0, 256}, {format, Fp8Scaling::tensor},
                                 m.holding({1}, std::vector<float>{scale}), out);
            return std::vector<Tensor>{out};
          },
          [](const std::vector<Tensor>&) {}, test::Alike::to_the_bit);
}

INSTANTIATE_TEST_SUITE_P(All, Fp8OnGpu, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// ---- products (on the emulated GPU by cuBLASLt's rules: tests/emulated_gpu) ----

double code_value(Fp8Format format, unsigned code) {
  const int bits = format == Fp8Format::e4m3 ? 3 : 2, bias = format == Fp8Format::e4m3 ? 7 : 15;
  const int exponent = static_cast<int>(code >> bits & ((1u << (7 - bits)) - 1)),
            mantissa = static_cast<int>(code & ((1u << bits) - 1));
  const double size = exponent > 0 ? std::ldexp(mantissa + (1 << bits), exponent - bias - bits)
                                   : std::ldexp(mantissa, 1 - bias - bits);
  return code & 0x80u ? -size : size;
}

/// The values of codes with their scales, row by row.
std::vector<double> meaning(Machine& m, const Fp8Matrix& x) {
  const Tensor codes = m.host(x.codes), scales = m.host(x.scales);
  std::vector<double> out;
  for (Count r = 0; r < x.rows; ++r)
    for (Count c = 0; c < x.cols; ++c) {
      const Count place = x.rule.scaling == Fp8Scaling::rows           ? r
                          : x.rule.scaling == Fp8Scaling::blocks_1x128 ? c / 128 * fp8_padded(x.rows) + r
                          : x.rule.scaling == Fp8Scaling::blocks_128x128
                              ? r / 128 * scales.shape()[1] + c / 128
                              : 0;
      out.push_back(code_value(x.rule.format, codes.data<std::uint8_t>()[r * fp8_padded(x.cols) + c]) *
                    static_cast<double>(scales.data<float>()[place]));
    }
  return out;
}

Fp8Matrix random_fp8(Machine& m, Fp8Rule rule, Count rows, Count cols, std::uint64_t stream) {
  std::vector<double> values = test::normals(rows * cols, stream);
  for (Count i = 0; i < rows * cols; ++i)  // scales that differ
    values[static_cast<std::size_t>(i)] *=
        std::ldexp(1.0, static_cast<int>(i / cols % 5 + i % cols / 128 * 3));
  Fp8Matrix out = empty_fp8(*m.device, rule, rows, cols);
  m.kernels.to_fp8(m.of({rows, cols}, DType::bf16, values), false, out, {});
  return out;
}

struct Fp8Pair {
  Fp8Rule a, b;
};
std::vector<Fp8Pair> pairs() {
  using enum Fp8Format;
  using enum Fp8Scaling;
  std::vector<Fp8Pair> out;
  for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::rows})
    for (const auto& [a, b] : {std::pair{e4m3, e4m3}, std::pair{e5m2, e4m3}, std::pair{e4m3, e5m2}})
      out.push_back({{a, scaling}, {b, scaling}});
  out.push_back({{e4m3, blocks_1x128}, {e4m3, blocks_1x128}});
  out.push_back({{e5m2, blocks_1x128}, {e4m3, blocks_128x128}});
  out.push_back({{e4m3, blocks_128x128}, {e4m3, blocks_1x128}});
  return out;
}

/// A product's parts in double, and bounds of what roundings may do to them.
struct Fp8Reference {
  std::vector<double> sum, size;

  Fp8Reference(Machine& m, const Fp8Matrix& a, const Fp8Matrix& b) {
    const std::vector<double> left = meaning(m, a), right = meaning(m, b);
    for (Count i = 0; i < a.rows; ++i)
      for (Count j = 0; j < b.rows; ++j) {
        double s = 0, t = 0;
        for (Count p = 0; p < a.cols; ++p) {
          const double product = left[static_cast<std::size_t>(i * a.cols + p)] *
                                 right[static_cast<std::size_t>(j * a.cols + p)];
          s += product, t += std::abs(product);
        }
        sum.push_back(s), size.push_back(t);
      }
  }
  void add(const std::vector<double>& values) {
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] += values[i % values.size()], size[i] += std::abs(values[i % values.size()]);
  }
  void expect(Machine& m, const Tensor& c) const {
    // A card's tensor cores add up with fewer bits than fp32 has.
    const double sums = m.family == "cuda" && !test::on_emulated_gpu() ? 0x1p-11 : 0x1p-21;
    const std::vector<double> got = test::values_of(m.host(c));
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_LE(std::abs(got[i] - sum[i]),
                test::roundoff(c.dtype()) * std::abs(sum[i]) * 1.01 + sums * size[i] + 1e-30)
          << "element " << i << ": " << got[i] << " for " << sum[i];
  }
};

TEST(Fp8Matmul, IsTheProductOfWhatTheCodesStandFor) {
  for (const auto& each : test::one_of_each()) {
    Machine& m = *each;
    SCOPED_TRACE(m.name());
    Count turn = 0;
    for (const Fp8Pair& pair : pairs())
      for (const DType dtype : {DType::bf16, DType::f32}) {
        const Count sizes[][3] = {{16, 16, 640}, {33, 48, 200}, {131, 48, 300}, {5, 16, 1}, {20, 144, 260}};
        const auto& [rows, cols, depth] = sizes[turn++ % 5];
        SCOPED_TRACE(cat(rows, " x ", cols, " x ", depth, ", scaling ", static_cast<int>(pair.a.scaling),
                         " and ", static_cast<int>(pair.b.scaling), " into ", name_of(dtype)));
        const Fp8Matrix a = random_fp8(m, pair.a, rows, depth, 1), b = random_fp8(m, pair.b, cols, depth, 2);
        const Fp8Reference want(m, a, b);
        const Tensor c = m.empty({rows, cols}, dtype);
        m.kernels.fill(c, 1e9);
        m.kernels.matmul({.c = c, .fp8_a = a, .fp8_b = b});
        want.expect(m, c);
        // Onto a sum, with a bias.
        const std::vector<double> before = test::normals_in(dtype, rows * cols, 3, 20),
                                  added = test::normals_in(DType::bf16, cols, 4, 20);
        Fp8Reference all = want;
        all.add(before), all.add(added);
        const Tensor sum = m.of({rows, cols}, dtype, before), bias = m.of({cols}, DType::bf16, added);
        m.kernels.matmul({.c = sum, .accumulate = true, .bias = bias, .fp8_a = a, .fp8_b = b});
        all.expect(m, sum);
        if (HasFailure()) return;
      }
  }
}

/// Also where the result, or the bias, begins where the library does not take it.
TEST(Fp8Matmul, BiasAndActivationFollow) {
  for (const auto& each : test::one_of_each()) {
    Machine& m = *each;
    SCOPED_TRACE(m.name());
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const Count rows : {Count{32}, Count{21}})
        for (const Count first : {Count{0}, Count{1}}) {
          const Count cols = 48, depth = 160;
          SCOPED_TRACE(cat(rows, " rows into ", name_of(dtype), ", from ", first));
          const Fp8Matrix a = random_fp8(m, {}, rows, depth, 1), b = random_fp8(m, {}, cols, depth, 2);
          const std::vector<double> added = test::normals_in(DType::bf16, cols, 4, 20);
          Fp8Reference want(m, a, b);
          want.add(added);
          const auto place = [&] {
            return beginning_at(m, dtype, std::vector<double>(static_cast<std::size_t>(rows * cols), 7),
                                first)
                .reshape({rows, cols});
          };
          const Tensor bias = beginning_at(m, DType::bf16, added, first), c = place(), pre = place(),
                       plain = place(), alone = place(), again = place();
          m.kernels.matmul({.c = plain, .bias = bias, .fp8_a = a, .fp8_b = b});
          want.expect(m, plain);
          const Activation kind = Activation::gelu_tanh;
          m.kernels.matmul(
              {.c = c, .bias = bias, .activation = kind, .pre_activation = pre, .fp8_a = a, .fp8_b = b});
          m.kernels.matmul({.c = alone, .bias = bias, .activation = kind, .fp8_a = a, .fp8_b = b});
          m.kernels.activation(kind, pre, again);
          EXPECT_EQ(test::bytes(m, pre), test::bytes(m, plain));
          EXPECT_EQ(test::bytes(m, c), test::bytes(m, again));
          EXPECT_EQ(test::bytes(m, alone), test::bytes(m, again));
          if (HasFailure()) return;
        }
  }
}

TEST(Fp8Matmul, TakesEmptyMatrices) {
  for (const auto& each : test::one_of_each()) {
    Machine& m = *each;
    SCOPED_TRACE(m.name());
    for (const Fp8Pair& pair : pairs()) {
      const Fp8Matrix none = empty_fp8(*m.device, pair.a, 0, 32), empty = empty_fp8(*m.device, pair.a, 3, 0),
                      b = random_fp8(m, pair.b, 16, 32, 1), rows = empty_fp8(*m.device, pair.b, 16, 0);
      m.kernels.to_fp8(m.empty({0, 32}, DType::bf16), false, none, {});
      m.kernels.matmul({.c = m.empty({0, 16}, DType::f32), .fp8_a = none, .fp8_b = b});
      const Tensor c = m.empty({3, 16}, DType::f32);
      m.kernels.fill(c, 5);
      m.kernels.matmul({.c = c, .fp8_a = empty, .fp8_b = rows});
      EXPECT_EQ(test::values_of(m.host(c)), std::vector<double>(48));
    }
  }
}

TEST(Fp8Matmul, NamesWhatItDoesNotTake) {
  for (const auto& each : test::one_of_each()) {
    Machine& m = *each;
    SCOPED_TRACE(m.name());
    const auto product = [&](Fp8Rule a, Fp8Rule b, Count cols = 16) {
      return [&m, a, b, cols] {
        m.kernels.matmul({.c = m.empty({16, cols}, DType::bf16),
                          .fp8_a = random_fp8(m, a, 16, 32, 1),
                          .fp8_b = random_fp8(m, b, cols, 32, 2)});
      };
    };
    for (const Fp8Scaling a : scalings)
      for (const Fp8Scaling b : scalings) {
        const bool together = std::ranges::any_of(
            pairs(), [&](const Fp8Pair& p) { return p.a.scaling == a && p.b.scaling == b; });
        const auto multiply = product({Fp8Format::e4m3, a}, {Fp8Format::e4m3, b});
        if (together)
          multiply();
        else
          expect_error(ErrorKind::usage, "operands in FP8 have one scale a tensor each", multiply);
      }
    expect_error(ErrorKind::usage, "must be E4M3", product({Fp8Format::e5m2}, {Fp8Format::e5m2}));
    if (m.family == "cuda")
      expect_error(ErrorKind::usage, "has 24 columns; a GPU needs a multiple of 16", product({}, {}, 24));
  }
}

TEST(Fp8Matmul, ARecipeNeedsACardThatHasIt) {
  const auto device = device::make_cpu_device(1);
  const auto require_on = [&](int capability, std::string_view name) {
    const auto kernels = test::make_emulated_kernels(*device, nullptr, capability);
    for (const Fp8Recipe& recipe : fp8_recipes())
      if (recipe.name == name) return kernels->require_fp8(recipe);
    FAIL() << name;
  };
  for (const int capability : {89, 90, 100, 120}) require_on(capability, "current");
  for (const char* name : {"rowwise", "blockwise"}) {
    require_on(90, name);
    for (const int capability : {89, 100})
      expect_error(ErrorKind::config,
                   cat(R"("fp8.recipe": ")", name, R"(" needs a GPU of compute capability 9.0)"),
                   [&] { require_on(capability, name); });
  }
  expect_error(ErrorKind::config, R"(this one's is 12.0. Set "fp8.recipe" to "current")",
               [&] { require_on(120, "blockwise"); });
  expect_error(ErrorKind::config, R"(capability 8.9 or above; this one's is 8.0. Train without "fp8")",
               [&] { require_on(80, "current"); });
  for (const Fp8Recipe& recipe : fp8_recipes()) Machine(cpu_isa(), 1).kernels.require_fp8(recipe);
}

}  // namespace
}  // namespace sherd::tensor
