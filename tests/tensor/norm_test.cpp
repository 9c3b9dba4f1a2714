#include <gtest/gtest.h>

#include <algorithm>

#include "support/expect_error.h"
#include "support/kernel_machines.h"

namespace sherd::test {
namespace {

struct Row {
  double mean = 0, rstd = 0;
};

Row statistics(const double* x, std::int64_t n, double eps, bool centre) {
  Row row;
  double squares = 0;
  for (std::int64_t i = 0; centre && i < n; ++i) row.mean += x[i] / static_cast<double>(n);
  for (std::int64_t i = 0; i < n; ++i) squares += (x[i] - row.mean) * (x[i] - row.mean);
  row.rstd = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
  return row;
}

struct Gradients {
  std::vector<double> dx, dweight, dbias;
};

/// Through the Jacobian of the normalisation, ∂x̂_i/∂x_j = rstd·(δ_ij - c/n - x̂_i·x̂_j/n), c 1 for LayerNorm
/// and 0 for RMS.
Gradients jacobian_gradients(const std::vector<double>& x, const std::vector<double>& w,
                             const std::vector<double>& dy, std::int64_t width, double eps, bool centre) {
  const auto n = static_cast<std::size_t>(width);
  Gradients out{std::vector<double>(x.size()), std::vector<double>(n), std::vector<double>(n)};
  for (std::size_t begin = 0; begin < x.size(); begin += n) {
    const Row row = statistics(x.data() + begin, width, eps, centre);
    std::vector<double> normal(n);
    for (std::size_t i = 0; i < n; ++i) normal[i] = (x[begin + i] - row.mean) * row.rstd;
    for (std::size_t i = 0; i < n; ++i) {
      out.dweight[i] += dy[begin + i] * normal[i];
      out.dbias[i] += dy[begin + i];
      for (std::size_t j = 0; j < n; ++j)
        out.dx[begin + j] += dy[begin + i] * w[i] * row.rstd *
                             ((i == j) - ((centre ? 1 : 0) + normal[i] * normal[j]) / static_cast<double>(n));
    }
  }
  return out;
}

class Norm : public ::testing::TestWithParam<std::tuple<DType, bool>> {};
INSTANTIATE_TEST_SUITE_P(All, Norm,
                         ::testing::Combine(::testing::ValuesIn(floating_dtypes), ::testing::Bool()),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) ? "_layer" : "_rms");
                         });

TEST_P(Norm, forward_and_backward_agree_with_double_arithmetic_and_across_machines) {
  const auto [dtype, centre] = GetParam();
  const bool layer = centre;
  const DType type = dtype, compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  const double eps = 1e-5;
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 2, 5}, Shape{70, 33}, Shape{300, 130}, Shape{0, 8}}) {
    const std::int64_t width = shape.back(), rows = shape.rows();
    std::vector<double> x = normals_in(type, rows * width, 1, 2), w = normals_in(type, width, 2),
                        b = normals_in(type, width, 3), dy = normals_in(type, rows * width, 4);
    for (double& value : x) value = rounded(value + 3, type);
    const std::vector<double> old = normals_in(type, width, 5, 100);
    on_every_machine(
        [&](Machine& m) {
          const Tensor tx = m.of(shape, type, x), tw = m.of({width}, type, w), tb = m.of({width}, type, b),
                       tdy = m.of(shape, type, dy);
          Tensor y = m.empty(shape, type), mean = m.empty({rows}, compute), rstd = m.empty({rows}, compute),
                 dx = m.empty(shape, type), dw = m.empty({width}, type), db = m.empty({width}, type),
                 dw_wide = m.empty({width}, compute), dw_sum = m.of({width}, type, old);
          m.kernels.fill(mean, 0);
          if (layer) {
            m.kernels.layer_norm(tx, tw, tb, eps, y, mean, rstd);
            m.kernels.layer_norm_backward(tx, tw, mean, rstd, tdy, dx, dw, db, false);
            m.kernels.layer_norm_backward(tx, tw, mean, rstd, tdy, {}, dw_wide, {}, false);
            m.kernels.layer_norm_backward(tx, tw, mean, rstd, tdy, {}, dw_sum, {}, true);
          } else {
            m.kernels.rms_norm(tx, tw, eps, y, rstd);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, dx, dw, false);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, {}, dw_wide, false);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, {}, dw_sum, true);
            m.kernels.fill(db, 0);
          }
          return std::vector<Tensor>{y, mean, rstd, dx, dw, db, dw_wide, dw_sum};
        },
        [&](const std::vector<Tensor>& got) {
          std::vector<double> y(x.size()), mean, rstd;
          for (std::int64_t r = 0; r < rows; ++r) {
            const Row row = statistics(x.data() + r * width, width, eps, layer);
            mean.push_back(row.mean), rstd.push_back(row.rstd);
            for (std::int64_t i = 0; i < width; ++i) {
              const auto at = static_cast<std::size_t>(r * width + i), column = static_cast<std::size_t>(i);
              y[at] = (x[at] - row.mean) * row.rstd * w[column] + (layer ? b[column] : 0);
            }
          }
          Gradients want = jacobian_gradients(x, w, dy, width, eps, layer);
          if (!layer) std::fill(want.dbias.begin(), want.dbias.end(), 0);
          // A row of one element has no spread: its x̂ is the rounding error of its mean times 1/√eps.
          const double spread = width == 1 ? 2000 : 20, terms = static_cast<double>(rows);
          expect_close(values_of(got[0]), y, type, 8, spread, "y");
          expect_close(values_of(got[1]), mean, compute, 8, 8, "mean");
          expect_close(values_of(got[2]), rstd, compute, 16, width == 1 ? 10 : 0, "rstd");
          if (width > 1) expect_close(values_of(got[3]), want.dx, type, 16, 40, "dx");
          expect_close(values_of(got[4]), want.dweight, type, 8, spread * (4 + terms), "dweight");
          expect_close(values_of(got[5]), want.dbias, type, 8, 4 + terms, "dbias");
          expect_close(values_of(got[6]), want.dweight, compute, 8, spread * (4 + terms), "dweight in fp32");
          std::vector<double> sum(old);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += want.dweight[i];
          expect_close(values_of(got[7]), sum, type, 8, 400 + spread * (4 + terms),
                       "dweight added to what was there");
        });
    if (HasFatalFailure()) return;
  }
}

TEST(NormVariants, weights_are_optional_and_rows_may_be_normalised_in_place) {
  for (const DType dtype : floating_dtypes)
    on_every_machine(
        [&](Machine& m) {
          const std::vector<double> x = normals_in(dtype, 7 * 45, 1);
          const DType compute = dtype == DType::f64 ? DType::f64 : DType::f32;
          Tensor plain = m.of({7, 45}, dtype, x), ones = m.empty({45}, dtype), y = m.empty({7, 45}, dtype);
          Tensor mean = m.empty({7}, compute), rstd = m.empty({7}, compute), zeros = m.empty({45}, dtype);
          m.kernels.fill(ones, 1);
          m.kernels.fill(zeros, 0);
          m.kernels.layer_norm(plain, ones, zeros, 1e-5, y, mean, rstd);
          m.kernels.layer_norm(plain, {}, {}, 1e-5, plain, mean, rstd);
          return std::vector<Tensor>{y, plain};
        },
        [&](const std::vector<Tensor>& got) { EXPECT_EQ(values_of(got[0]), values_of(got[1])); });
}

TEST(NormErrors, name_the_argument) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({4, 8}, DType::bf16), w = m.empty({8}, DType::bf16),
               wide = m.empty({8}, DType::f32), rows = m.empty({4}, DType::f32),
               half = m.empty({4}, DType::bf16);
  using testing::expect_error;
  expect_error(ErrorKind::usage, "layer_norm: weight must be bf16, not fp32",
               [&] { m.kernels.layer_norm(x, wide, w, 1e-5, x, rows, rows); });
  expect_error(ErrorKind::usage, "layer_norm: mean must be fp32, not bf16",
               [&] { m.kernels.layer_norm(x, w, w, 1e-5, x, half, rows); });
  expect_error(ErrorKind::usage, "rms_norm: rstd must have 4 elements",
               [&] { m.kernels.rms_norm(x, w, 1e-5, x, wide); });
  expect_error(ErrorKind::usage, "dweight must have 8 elements",
               [&] { m.kernels.rms_norm_backward(x, w, rows, x, x, rows, false); });
}

}  // namespace
}  // namespace sherd::test
