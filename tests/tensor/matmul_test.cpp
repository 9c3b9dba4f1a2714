#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "base/random.h"
#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "support/print_dtype.h"
#include "tensor/cpu/gemm_blocks.h"

namespace sherd::tensor {
namespace {

using Count = std::int64_t;
using test::all_machines, test::bytes, test::Machine, test::one_of_each;

Tensor random_matrix(Machine& m, const Shape& shape, DType dtype, std::uint64_t stream, double std = 1) {
  Tensor x = m.empty(shape, dtype);
  m.kernels.fill_normal(x, {7, stream}, 0, 0.0, std);
  return x;
}
std::vector<double> matrix_values(Machine& m, const Tensor& x) {
  return test::values_of(m.host(x));
}

struct ProductReference {
  std::vector<double> sum, magnitude;  ///< Σ a·b and Σ |a·b|
};

ProductReference multiply(const std::vector<double>& a, const std::vector<double>& b, Count m, Count n,
                          Count k, bool ta, bool tb) {
  ProductReference out{std::vector<double>(static_cast<std::size_t>(m * n)),
                       std::vector<double>(static_cast<std::size_t>(m * n))};
  for (Count i = 0; i < m; ++i)
    for (Count p = 0; p < k; ++p) {
      const double x = a[static_cast<std::size_t>(ta ? p * m + i : i * k + p)];
      for (Count j = 0; j < n; ++j) {
        const double y = b[static_cast<std::size_t>(tb ? j * k + p : p * n + j)];
        out.sum[static_cast<std::size_t>(i * n + j)] += x * y;
        out.magnitude[static_cast<std::size_t>(i * n + j)] += std::abs(x * y);
      }
    }
  return out;
}

/// Every element within one rounding of c's dtype and the error of k sums in the compute type.
void expect_products(const std::vector<double>& got, const ProductReference& want, Count k, DType dtype,
                     const std::string& what) {
  const double sums =
      test::roundoff(dtype == DType::f64 ? DType::f64 : DType::f32) * (4 + std::sqrt(double(k)));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double bound = test::roundoff(dtype) * std::abs(want.sum[i]) * 1.01 + sums * want.magnitude[i];
    ASSERT_LE(std::abs(got[i] - want.sum[i]), bound)
        << what << " element " << i << ": " << got[i] << " for " << want.sum[i];
  }
}

struct MatmulCase {
  Count m, n, k;
};

class MatmulOfDType : public ::testing::TestWithParam<DType> {};

TEST_P(MatmulOfDType, EqualsTheDoubleReferenceInEveryLayout) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    for (const auto [m, n, k] : {MatmulCase{1, 1, 1}, MatmulCase{3, 5, 7}, MatmulCase{16, 64, 32},
                                 MatmulCase{129, 65, 33}, MatmulCase{1, 77, 130}, MatmulCase{150, 1, 9},
                                 MatmulCase{40, 1600, 20}, MatmulCase{300, 70, 64}, MatmulCase{9, 33, 5001}})
      for (const bool ta : {false, true})
        for (const bool tb : {false, true}) {
          const Tensor a = random_matrix(machine, ta ? Shape{k, m} : Shape{m, k}, GetParam(), 1);
          const Tensor b = random_matrix(machine, tb ? Shape{n, k} : Shape{k, n}, GetParam(), 2);
          const ProductReference want =
              multiply(matrix_values(machine, a), matrix_values(machine, b), m, n, k, ta, tb);
          for (const DType out : {GetParam(), GetParam() == DType::f64 ? DType::f64 : DType::f32}) {
            const Tensor c = Tensor::zeros(*machine.device, Shape{m, n}, out);
            machine.kernels.matmul({.a = a, .b = b, .c = c, .trans_a = ta, .trans_b = tb});
            expect_products(matrix_values(machine, c), want, k, out,
                            cat(m, "x", n, "x", k, ta ? " T" : " N", tb ? "T" : "N", " into ", name_of(out)));
            if (HasFatalFailure()) return;
          }
        }
  }
}

TEST_P(MatmulOfDType, AccumulatesInTheComputeTypeAndRoundsOnce) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    const Count m = 130, n = 90, k = 48;
    const Tensor a = random_matrix(machine, {m, k}, GetParam(), 1),
                 b = random_matrix(machine, {n, k}, GetParam(), 2);
    const Tensor c = random_matrix(machine, {m, n}, GetParam(), 3);
    ProductReference want =
        multiply(matrix_values(machine, a), matrix_values(machine, b), m, n, k, false, true);
    const std::vector<double> before = matrix_values(machine, c);
    for (std::size_t i = 0; i < before.size(); ++i)
      want.sum[i] += before[i], want.magnitude[i] += std::abs(before[i]);
    machine.kernels.matmul({.a = a, .b = b, .c = c, .trans_b = true, .accumulate = true});
    expect_products(matrix_values(machine, c), want, k, GetParam(), "accumulated");
  }
}

TEST_P(MatmulOfDType, AddsTheBiasBeforeRounding) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    const Count m = 31, n = 1000, k = 24;
    const Tensor a = random_matrix(machine, {m, k}, GetParam(), 1),
                 b = random_matrix(machine, {k, n}, GetParam(), 2);
    const Tensor bias = random_matrix(machine, {n}, GetParam(), 3), c = machine.empty({m, n}, GetParam());
    ProductReference want =
        multiply(matrix_values(machine, a), matrix_values(machine, b), m, n, k, false, false);
    const std::vector<double> added = matrix_values(machine, bias);
    for (std::size_t i = 0; i < want.sum.size(); ++i)
      want.sum[i] += added[i % added.size()], want.magnitude[i] += std::abs(added[i % added.size()]);
    machine.kernels.matmul({.a = a, .b = b, .c = c, .bias = bias});
    expect_products(matrix_values(machine, c), want, k, GetParam(), "with bias");
  }
}

TEST_P(MatmulOfDType, ActivationIsThatOfTheRoundedSum) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    const Count m = 70, n = 840, k = 40;
    const Tensor a = random_matrix(machine, {m, k}, GetParam(), 1),
                 b = random_matrix(machine, {n, k}, GetParam(), 2);
    const Tensor bias = random_matrix(machine, {n}, GetParam(), 3);
    const Tensor plain = machine.empty({m, n}, GetParam());
    machine.kernels.matmul({.a = a, .b = b, .c = plain, .trans_b = true, .bias = bias});
    for (const Activation kind : {Activation::gelu_tanh, Activation::gelu_erf}) {
      const Tensor pre = machine.empty({m, n}, GetParam());
      const Tensor c = machine.empty({m, n}, GetParam());
      const Tensor alone = machine.empty({m, n}, GetParam());
      const Tensor again = machine.empty({m, n}, GetParam());
      machine.kernels.matmul(
          {.a = a, .b = b, .c = c, .trans_b = true, .bias = bias, .activation = kind, .pre_activation = pre});
      machine.kernels.matmul({.a = a, .b = b, .c = alone, .trans_b = true, .bias = bias, .activation = kind});
      machine.kernels.activation(kind, pre, again);
      EXPECT_EQ(bytes(machine, pre), bytes(machine, plain));
      EXPECT_EQ(bytes(machine, c), bytes(machine, again));
      EXPECT_EQ(bytes(machine, alone), bytes(machine, again));
    }
  }
}

TEST_P(MatmulOfDType, IsTheSameToTheBitForAnyNumberOfThreadsAndEveryTime) {
  for (const auto [m, n, k] : {MatmulCase{257, 1700, 96}, MatmulCase{515, 130, 4500}})
    for (const bool ta : {false, true}) {
      std::vector<std::byte> first;
      for (const int threads : {1, 2, 3}) {
        Machine machine(cpu_isa(), threads);
        const Tensor a = random_matrix(machine, ta ? Shape{k, m} : Shape{m, k}, GetParam(), 1);
        const Tensor b = random_matrix(machine, {n, k}, GetParam(), 2);
        const Tensor c = machine.empty({m, n}, GetParam());
        for (int repeat = 0; repeat < 2; ++repeat) {
          machine.kernels.fill(c, 1e9);
          machine.kernels.matmul({.a = a, .b = b, .c = c, .trans_a = ta, .trans_b = true});
          if (first.empty()) first = bytes(machine, c);
          EXPECT_EQ(bytes(machine, c), first) << threads << " threads, call " << repeat;
        }
      }
    }
}

/// Experts on other ranks see other numbers of rows: what each gives must not change with them.
TEST_P(MatmulOfDType, ARowIsTheSameToTheBitWhateverRowsAreBesideIt) {
  if (GetParam() == DType::f64) GTEST_SKIP() << "fp64 is for checks of gradients alone";
  Machine machine(cpu_isa(), 1);
  for (const auto [m, n, k] : {MatmulCase{207, 70, 300}, MatmulCase{131, 850, 33}, MatmulCase{35, 40, 4500}})
    for (const bool ta : {false, true})
      for (const bool tb : {false, true}) {
        const Tensor a = random_matrix(machine, ta ? Shape{k, m} : Shape{m, k}, GetParam(), 1);
        const Tensor b = random_matrix(machine, tb ? Shape{n, k} : Shape{k, n}, GetParam(), 2);
        const auto product = [&](const Tensor& rows, Count count) {
          const Tensor c = machine.empty({count, n}, DType::f32);  // what rounding would hide
          machine.kernels.matmul({.a = rows, .b = b, .c = c, .trans_a = ta, .trans_b = tb});
          return bytes(machine, c);
        };
        const auto element = static_cast<Count>(size_of(GetParam()));
        const std::vector<std::byte> all = product(a, m);
        for (const Count count : {1, 2, 3, 4, 5, 6, 7, 11, 13, 34})
          for (const Count first : {Count{0}, m - count}) {
            const Tensor rows = machine.empty(ta ? Shape{k, count} : Shape{count, k}, GetParam());
            for (Count line = 0; line < (ta ? k : count); ++line)
              std::memcpy(rows.raw() + line * (ta ? count : k) * element,
                          a.raw() + (ta ? line * m + first : (first + line) * k) * element,
                          static_cast<std::size_t>((ta ? count : k) * element));
            const auto width = n * static_cast<Count>(sizeof(float));
            const auto from = all.begin() + first * width;
            ASSERT_TRUE(std::equal(from, from + count * width, product(rows, count).begin()))
                << count << " rows from " << first << " of " << m << "x" << n << "x" << k << " " << ta << tb;
          }
      }
}

/// `std`: of a and b; small ones give products and sums on both sides of the smallest normal number.
void expect_folds_as_apart(Machine& machine, const MatmulCase& size, double std, DType dtype, DType to) {
  const auto [m, n, k] = size;
  for (const bool ta : {false, true})
    for (const DType rounding : {DType::f32, DType::bf16, DType::f16})
      for (const bool accumulate : {false, true}) {
        const Tensor a = random_matrix(machine, ta ? Shape{k, m} : Shape{m, k}, dtype, 1, std);
        const Tensor b = random_matrix(machine, {k, n}, dtype, 2, std), apart = machine.empty({m, n}, to);
        const Tensor want = random_matrix(machine, {m, n}, to, 3, std * std),
                     got = random_matrix(machine, {m, n}, to, 3, std * std);
        machine.kernels.matmul({.a = a, .b = b, .c = apart, .trans_a = ta});
        machine.kernels.fold(apart, rounding, want, accumulate);
        machine.kernels.matmul(
            {.a = a, .b = b, .c = got, .trans_a = ta, .accumulate = accumulate, .fold = rounding});
        ASSERT_EQ(bytes(machine, got), bytes(machine, want))
            << m << "x" << n << "x" << k << (ta ? " T, rounded to " : ", rounded to ") << name_of(rounding)
            << (accumulate ? ", onto a sum of " : ", into ") << name_of(to) << ", values of " << std;
      }
}

/// As one row gives it, whatever the number of rows, of threads, and the instruction set.
TEST_P(MatmulOfDType, FewRowsAreEachMultipliedByItself) {
  const DType dtype = GetParam();
  for (const auto& [rows, n, k] : {std::array<Count, 3>{1, 1, 1},
                                   {1, 70, 33},
                                   {2, 131, 64},
                                   {3, 5, 31},
                                   {7, 301, 96},
                                   {21, 66, 130},
                                   {1, 1000, 257}}) {
    const std::vector<double> a = test::normals_in(dtype, rows * k, 1), b = test::normals_in(dtype, n * k, 2),
                              bias = test::normals_in(dtype, n, 3);
    const ProductReference want = multiply(a, b, rows, n, k, false, true);
    test::on_every_cpu(
        [&](Machine& m) {
          const Tensor right = m.of({n, k}, dtype, b), c = m.empty({rows, n}, dtype),
                       act = m.empty({rows, n}, dtype), pre = m.empty({rows, n}, dtype);
          m.kernels.matmul(
              {.a = m.of({rows, k}, dtype, a), .b = right, .c = c, .trans_b = true, .few_rows = true});
          m.kernels.matmul({.a = m.of({rows, k}, dtype, a),
                            .b = right,
                            .c = act,
                            .trans_b = true,
                            .bias = m.of({n}, dtype, bias),
                            .activation = Activation::gelu_tanh,
                            .pre_activation = pre,
                            .few_rows = true});
          const Tensor again = m.empty({rows, n}, dtype);
          m.kernels.activation(Activation::gelu_tanh, pre, again);
          EXPECT_EQ(bytes(m, act), bytes(m, again));
          for (Count i = 0; i < rows && dtype != DType::f64; ++i) {
            const Tensor alone = m.empty({1, n}, dtype);
            m.kernels.matmul({.a = m.of({1, k}, dtype, {a.begin() + i * k, a.begin() + (i + 1) * k}),
                              .b = right,
                              .c = alone,
                              .trans_b = true,
                              .few_rows = true});
            EXPECT_EQ(bytes(m, alone), bytes(m, c.rows(i, i + 1))) << i << " of " << rows;
          }
          return std::vector<Tensor>{c, pre};
        },
        [&](const std::vector<Tensor>& got) {
          for (const bool biased : {false, true}) {
            const std::vector<double> values = test::values_of(got[biased ? 1 : 0]);
            for (std::size_t i = 0; i < values.size(); ++i) {
              const double sum = want.sum[i] + (biased ? bias[i % static_cast<std::size_t>(n)] : 0);
              ASSERT_NEAR(values[i], sum,
                          (std::abs(sum) + 1e-3) * 1.01 * test::roundoff(dtype) + want.magnitude[i] * 1e-6)
                  << rows << " x " << n << " x " << k << ", element " << i;
            }
          }
        });
    if (HasFatalFailure()) return;
  }
}

TEST_P(MatmulOfDType, FoldsAsIfTheProductHadBeenFormedApart) {
  if (GetParam() == DType::f64) GTEST_SKIP() << "fp64 is not folded";
  for (const auto& each : all_machines()) {
    Machine& machine = *each;
    if (!machine.kernels.folds_gradients()) continue;
    SCOPED_TRACE(machine.name());
    for (const DType to : std::set{GetParam(), DType::f32}) {
      for (const MatmulCase& size : {MatmulCase{1, 1, 1}, MatmulCase{130, 1700, 96}, MatmulCase{70, 40, 2049},
                                     MatmulCase{70, 40, 5001}, MatmulCase{3, 5, 0}, MatmulCase{2, 2500, 0}})
        expect_folds_as_apart(machine, size, 1, GetParam(), to);
      expect_folds_as_apart(machine, {130, 90, 96}, GetParam() == DType::f16 ? 1e-3 : 1e-19, GetParam(), to);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Matmul, FoldsAProductAlone) {
  Machine machine(cpu_isa(), 1);
  const Tensor a = random_matrix(machine, {2, 2}, DType::bf16, 1),
               narrow = machine.empty({2, 2}, DType::bf16), wide = machine.empty({2, 2}, DType::f32),
               bias = random_matrix(machine, {2}, DType::bf16, 2);
  for (const Matmul& wrong : {Matmul{.a = a, .b = a, .c = narrow, .fold = DType::f64},
                              Matmul{.a = a, .b = a, .c = wide, .fold = DType::f64},
                              Matmul{.a = a, .b = a, .c = wide, .fold = DType::bf16, .bias = bias}})
    sherd::testing::expect_error(ErrorKind::usage, "only a product alone can be folded",
                                 [&] { machine.kernels.matmul(wrong); });
}

TEST_P(MatmulOfDType, EmptyInnerExtentGivesTheBias) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    const Tensor a = Tensor::empty(*machine.device, {3, 0}, GetParam()),
                 b = Tensor::empty(*machine.device, {0, 4}, GetParam());
    const Tensor bias = random_matrix(machine, {4}, GetParam(), 3),
                 c = random_matrix(machine, {3, 4}, GetParam(), 4);
    machine.kernels.matmul({.a = a, .b = b, .c = c, .bias = bias});
    const std::vector<double> want = matrix_values(machine, bias), got = matrix_values(machine, c);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want[i % 4]);
  }
}

TEST_P(MatmulOfDType, FoldsLeadingExtentsIntoRows) {
  for (const auto& each : one_of_each()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    const Tensor a = random_matrix(machine, {2, 3, 8}, GetParam(), 1),
                 b = random_matrix(machine, {8, 5}, GetParam(), 2);
    const Tensor c = Tensor::empty(*machine.device, {2, 3, 5}, GetParam());
    machine.kernels.matmul({.a = a, .b = b, .c = c});
    expect_products(matrix_values(machine, c),
                    multiply(matrix_values(machine, a), matrix_values(machine, b), 6, 5, 8, false, false), 8,
                    GetParam(), "folded");
  }
}

TEST_P(MatmulOfDType, SumRowsEqualsTheReferenceAndAccumulates) {
  for (const auto& each : test::all_machines()) {
    Machine& machine = *each;
    SCOPED_TRACE(machine.name());
    for (const auto [m, n, unused] :
         {MatmulCase{1, 1, 0}, MatmulCase{7, 1100, 0}, MatmulCase{1000, 33, 0}, MatmulCase{0, 4, 0}})
      for (const bool accumulate : {false, true}) {
        const Tensor x = random_matrix(machine, {m, n}, GetParam(), 1),
                     out = random_matrix(machine, {n}, GetParam(), 2);
        const std::vector<double> from = matrix_values(machine, x), before = matrix_values(machine, out);
        ProductReference want{std::vector<double>(static_cast<std::size_t>(n)),
                              std::vector<double>(static_cast<std::size_t>(n))};
        for (std::size_t j = 0; j < want.sum.size(); ++j) {
          if (accumulate) want.sum[j] = before[j], want.magnitude[j] = std::abs(before[j]);
          for (std::size_t i = 0; i < static_cast<std::size_t>(m); ++i) {
            want.sum[j] += from[i * want.sum.size() + j];
            want.magnitude[j] += std::abs(from[i * want.sum.size() + j]);
          }
        }
        machine.kernels.sum_rows(x, out, accumulate);
        expect_products(matrix_values(machine, out), want, m, GetParam(), cat("sum of ", m, " rows of ", n));
      }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MatmulOfDType,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64), dtype_name);

/// Each product of blocks that this processor can run, whichever the kernels would choose.
std::vector<std::unique_ptr<cpu::BlockProduct>> block_products() {
  std::vector<std::unique_ptr<cpu::BlockProduct>> all;
  for (CpuIsa isa = CpuIsa::portable; isa <= cpu_isa(); isa = static_cast<CpuIsa>(static_cast<int>(isa) + 1))
    all.push_back(cpu::make_f32_tiles(isa));
  if (cpu_has_bf16_products()) {
    all.push_back(cpu::make_dnnl_blocks());
    all.push_back(cpu::make_bf16_tiles());
  }
  return all;
}

TEST(BlockProduct, EveryOneEqualsTheReference) {
  Machine machine(cpu_isa(), 1);
  for (const auto& product : block_products())
    for (const auto [m, n, k] :
         {MatmulCase{1, 1, 2}, MatmulCase{13, 40, 34}, MatmulCase{128, 70, 1800}, MatmulCase{9, 32, 33}})
      for (const bool tb : {false, true}) {
        const DType dtype = product->dtype();
        const Count b_stride = tb ? product->b_stride(k, 0) : n;
        cpu::GemmBlock block{.rows = m,
                             .cols = n,
                             .depth = k,
                             .full_rows = m,
                             .a_stride = product->a_stride(k, 0),
                             .count = k};
        // Rows are laid out at the stride that the product asks for, with zeros behind them.
        const Tensor a = random_matrix(machine, {m, k}, dtype, 1),
                     b = random_matrix(machine, tb ? Shape{n, k} : Shape{k, n}, dtype, 2);
        const auto spread = [&](const Tensor& x, Count stride) {
          const Tensor out = Tensor::zeros(*machine.device, {x.shape()[0], stride}, dtype);
          for (Count i = 0; i < x.shape()[0]; ++i) {
            const Tensor row = x.rows(i, i + 1);
            std::memcpy(out.rows(i, i + 1).raw(), row.raw(), row.bytes());
          }
          return out;
        };
        const Tensor rows = spread(a, block.a_stride), lines = spread(b, b_stride);
        const Tensor packed = Tensor::empty(*machine.device, {product->packed_bytes(block)}, DType::u8);
        // In the parts that threads would share, last ones first.
        const Count step = product->pack_step(tb) > 0 ? product->pack_step(tb) : tb ? n : k;
        for (Count begin = ((tb ? n : k) - 1) / step * step; begin >= 0; begin -= step) {
          const Count count = std::min(step, (tb ? n : k) - begin);
          const cpu::GemmPackPart part =
              tb ? cpu::GemmPackPart{begin, count, 0, k} : cpu::GemmPackPart{0, n, begin, count};
          product->pack(block, part, lines.rows(begin, begin + count).raw(), tb ? 1 : b_stride,
                        tb ? b_stride : 1, packed.raw());
        }
        const Count c_stride = product->c_stride(n);
        const Tensor c = Tensor::empty(*machine.device, {m, c_stride}, DType::f32);
        product->multiply(block, rows.raw(), packed.raw(), c.data<float>(), nullptr);
        const auto sums = [&] {
          std::vector<double> got;
          for (Count i = 0; i < m; ++i)
            got.insert(got.end(), c.data<float>() + i * c_stride, c.data<float>() + i * c_stride + n);
          return got;
        };
        const std::vector<double> got = sums();
        expect_products(got,
                        multiply(matrix_values(machine, a), matrix_values(machine, b), m, n, k, false, tb), k,
                        DType::f32, cat(name_of(dtype), " ", m, "x", n, "x", k));
        const Count left_bytes = product->packed_left_bytes(block);
        if (left_bytes == 0) continue;
        const Tensor columns = Tensor::empty(*machine.device, {k, m}, dtype),
                     left = Tensor::empty(*machine.device, {left_bytes}, DType::u8);
        const auto element = static_cast<Count>(size_of(dtype));
        for (Count i = 0; i < m * k; ++i)
          std::memcpy(columns.raw() + (i % k * m + i / k) * element, a.raw() + i * element, size_of(dtype));
        product->pack_left(block, columns.raw(), m, left.raw());
        block.a_stride = 0;
        machine.kernels.fill(c, 1e9);
        product->multiply(block, left.raw(), packed.raw(), c.data<float>(), nullptr);
        EXPECT_EQ(sums(), got) << "from columns: " << m << "x" << n << "x" << k;
      }
}

TEST(Transpose, PutsEveryPairInItsPlaceAndNoneBeyond) {
  if (cpu_isa() != CpuIsa::avx512) GTEST_SKIP() << "AMX's processors have AVX-512";
  for (const auto [rows, cols, unused] :
       {MatmulCase{1, 1, 0}, MatmulCase{15, 17, 0}, MatmulCase{16, 16, 0}, MatmulCase{32, 48, 0},
        MatmulCase{33, 70, 0}, MatmulCase{64, 31, 0}}) {
    const Count stride = cols + 3, lines = (rows + 1) / 2, to_stride = rows + 5;
    const auto size = static_cast<std::size_t>(std::max(rows * stride, cols * to_stride));
    std::vector<std::uint32_t> to(size, 0xdeadbeef), want(size, 0xdeadbeef);
    std::vector<std::uint16_t> halves(static_cast<std::size_t>(rows * stride));
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i * 40503u);
    for (Count u = 0; u < lines; ++u)
      for (Count c = 0; c < cols; ++c) {
        const auto at = static_cast<std::size_t>(2 * u * stride + c);
        const std::uint32_t below = 2 * u + 1 < rows ? halves[at + static_cast<std::size_t>(stride)] : 0;
        want[static_cast<std::size_t>(c * to_stride + u)] = halves[at] | below << 16;
      }
    cpu::avx512::transpose_pairs(halves.data(), stride, rows, cols, to.data(), to_stride);
    EXPECT_EQ(to, want) << rows << "x" << cols << " pairs";
  }
}

TEST(Matmul, NamesWhatDoesNotFit) {
  Machine machine(cpu_isa(), 1);
  const auto tensor = [&](const Shape& shape, DType dtype = DType::f32) {
    return Tensor::zeros(*machine.device, shape, dtype);
  };
  const auto call = [&](const Matmul& args) { return [&machine, args] { machine.kernels.matmul(args); }; };
  const Tensor a = tensor({2, 3}), b = tensor({3, 4}), c = tensor({2, 4});
  using sherd::testing::expect_error;
  expect_error(ErrorKind::usage, "inner extents 3 and 4 differ", call({.a = a, .b = tensor({4, 3}), .c = c}));
  expect_error(ErrorKind::usage, "c is [2, 5]", call({.a = a, .b = b, .c = tensor({2, 5})}));
  expect_error(ErrorKind::usage, "a is fp32 and b is bf16",
               call({.a = a, .b = tensor({3, 4}, DType::bf16), .c = c}));
  expect_error(ErrorKind::usage, "c is bf16", call({.a = a, .b = b, .c = tensor({2, 4}, DType::bf16)}));
  expect_error(ErrorKind::usage, "bias is fp32 [3]", call({.a = a, .b = b, .c = c, .bias = tensor({3})}));
  expect_error(ErrorKind::usage, "accumulate",
               call({.a = a, .b = b, .c = c, .accumulate = true, .activation = Activation::gelu_tanh}));
}

}  // namespace
}  // namespace sherd::tensor
