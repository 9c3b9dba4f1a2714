#include <gtest/gtest.h>

#include <algorithm>

#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/gpu/kernel_machines.h"

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

/// The same in time that grows with the rows' widths, by dx = rstd·(g - c·mean(g) - x̂·mean(g·x̂)), g = dy·w.
Gradients direct_gradients(const std::vector<double>& x, const std::vector<double>& w,
                           const std::vector<double>& dy, std::int64_t width, double eps, bool centre) {
  const auto n = static_cast<std::size_t>(width);
  Gradients out{std::vector<double>(x.size()), std::vector<double>(n), std::vector<double>(n)};
  for (std::size_t begin = 0; begin < x.size(); begin += n) {
    const Row row = statistics(x.data() + begin, width, eps, centre);
    const auto normal = [&](std::size_t i) { return (x[begin + i] - row.mean) * row.rstd; };
    double mean = 0, slope = 0;
    for (std::size_t i = 0; i < n; ++i) {
      out.dweight[i] += dy[begin + i] * normal(i);
      out.dbias[i] += dy[begin + i];
      mean += dy[begin + i] * w[i] / static_cast<double>(n);
      slope += dy[begin + i] * w[i] * normal(i) / static_cast<double>(n);
    }
    for (std::size_t i = 0; i < n; ++i)
      out.dx[begin + i] = row.rstd * (dy[begin + i] * w[i] - (centre ? mean : 0) - normal(i) * slope);
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
  for (const Shape& shape :
       {Shape{1, 1}, Shape{3, 2, 5}, Shape{6, 64}, Shape{70, 33}, Shape{300, 130}, Shape{0, 8}}) {
    const std::int64_t width = shape.back(), rows = shape.rows();
    const double shift = !layer && (width == 64 || width == 5) ? 1 : 0;
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
            m.kernels.rms_norm(tx, tw, eps, y, rstd, shift);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, dx, dw, false, false, shift);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, {}, dw_wide, false, false, shift);
            m.kernels.rms_norm_backward(tx, tw, rstd, tdy, {}, dw_sum, true, false, shift);
            m.kernels.fill(db, 0);
          }
          return std::vector<Tensor>{y, mean, rstd, dx, dw, db, dw_wide, dw_sum};
        },
        [&](const std::vector<Tensor>& got) {
          std::vector<double> y(x.size()), mean, rstd, gain(w);
          for (double& g : gain) g += shift;
          for (std::int64_t r = 0; r < rows; ++r) {
            const Row row = statistics(x.data() + r * width, width, eps, layer);
            mean.push_back(row.mean), rstd.push_back(row.rstd);
            for (std::int64_t i = 0; i < width; ++i) {
              const auto at = static_cast<std::size_t>(r * width + i), column = static_cast<std::size_t>(i);
              y[at] = (x[at] - row.mean) * row.rstd * gain[column] + (layer ? b[column] : 0);
            }
          }
          Gradients want = jacobian_gradients(x, gain, dy, width, eps, layer);
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

/// Rows that a warp takes, that a block takes, and that do not fit into its registers, by packs and element
/// by element; and groups of them that are whole and that are not. dweight and dbias of two dtypes.
TEST_P(Norm, rows_of_any_length_and_number_have_the_gradients_of_double_arithmetic) {
  const auto [type, centre] = GetParam();
  const bool layer = centre;
  const DType dtype = type, compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const Shape& shape : {Shape{1, 768}, Shape{21, 256}, Shape{4613, 8}, Shape{9, 1024}, Shape{11, 777},
                             Shape{9, 1031}, Shape{3, 4096}, Shape{9, 8200}, Shape{1, 20000}}) {
    SCOPED_TRACE(shape.str());
    const std::int64_t width = shape.back(), rows = shape.rows();
    const bool many = rows > 1000 || width > 4000;  // which takes the emulator its time
    // In the part fp32 with a centre and bf16 without.
    const bool rare = dtype == DType::f16 || dtype == DType::f64 || (dtype == DType::f32) != layer;
    if (many && rare && !full_suite() && !gpu_run()) continue;
    const std::vector<double> x = normals_in(dtype, rows * width, 1, 2), w = normals_in(dtype, width, 2),
                              dy = normals_in(dtype, rows * width, 4), old = normals_in(dtype, width, 5);
    on_every_machine(
        [&](Machine& m) {
          const Tensor tx = m.of(shape, dtype, x), tw = m.of({width}, dtype, w), tdy = m.of(shape, dtype, dy),
                       mean = m.empty({rows}, compute), rstd = m.empty({rows}, compute);
          m.kernels.fill(mean, 0);
          if (layer)
            m.kernels.layer_norm(tx, tw, {}, 1e-5, m.empty(shape, dtype), mean, rstd);
          else
            m.kernels.rms_norm(tx, tw, 1e-5, m.empty(shape, dtype), rstd);
          std::vector<Tensor> out;
          const auto differentiate = [&](bool to_x, bool to_weight, bool to_bias, bool accumulate) {
            const Tensor dx = to_x ? m.empty(shape, dtype) : Tensor(),
                         dw = to_weight ? m.of({width}, dtype, old) : Tensor(),
                         db = to_bias && layer ? m.of({width}, compute, old) : Tensor();
            if (layer)
              m.kernels.layer_norm_backward(tx, tw, mean, rstd, tdy, dx, dw, db, accumulate);
            else
              m.kernels.rms_norm_backward(tx, tw, rstd, tdy, dx, dw, accumulate);
            for (const Tensor& each : {dx, dw, db})
              if (each) out.push_back(each);
          };
          differentiate(true, true, true, true);
          if (many) return out;
          differentiate(true, true, true, false);
          differentiate(true, false, false, false);
          differentiate(false, true, false, false);
          differentiate(false, false, true, false);
          return out;
        },
        [&](const std::vector<Tensor>& got) {
          const Gradients want = direct_gradients(x, w, dy, width, 1e-5, layer);
          const double terms = 20 * (4 + static_cast<double>(rows));
          const auto plus_old = [&](std::vector<double> sums) {
            for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += old[i];
            return sums;
          };
          const std::size_t all = layer ? 3 : 2;
          expect_close(values_of(got[0]), want.dx, dtype, 16, 100, "dx");
          expect_close(values_of(got[1]), plus_old(want.dweight), dtype, 8, terms, "dweight, accumulated");
          if (layer) expect_close(values_of(got[2]), plus_old(want.dbias), compute, 8, terms, "dbias, too");
          if (many) return;
          expect_close(values_of(got[all + 1]), want.dweight, dtype, 8, terms, "dweight");
          if (layer) expect_close(values_of(got[all + 2]), want.dbias, compute, 8, terms, "dbias");
          EXPECT_EQ(values_of(got[all]), values_of(got[0]));
          for (std::size_t i = 0; i < all; ++i)
            EXPECT_EQ(values_of(got[2 * all + i]), values_of(got[all + i]));
        });
    if (HasFatalFailure()) return;
  }
}

/// Rows of every layout on the emulator, and all that the CPU's loops have tails for.
TEST_P(Norm, a_gradient_onto_another_has_the_bits_of_writing_and_adding) {
  const auto [type, centre] = GetParam();
  const bool layer = centre;
  const DType dtype = type, compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 5}, Shape{19, 72}, Shape{2, 768}, Shape{3, 1031},
                             Shape{2, 4096}, Shape{1, 20000}})
    for (const bool weighted : {false, true})
      for (const auto& machine : all_machines()) {
        Machine& m = *machine;
        simt::set_order(m.order);
        SCOPED_TRACE(cat(m.name(), ", ", shape.str(), weighted ? ", weighted" : ""));
        const std::int64_t width = shape.back(), rows = shape.rows(), n = shape.numel();
        std::vector<double> old = normals_in(dtype, n, 3);
        old[0] = std::nan("");
        const Tensor x = m.of(shape, dtype, normals_in(dtype, n, 1, 2)), mean = m.empty({rows}, compute),
                     rstd = m.empty({rows}, compute), dy = m.of(shape, dtype, normals_in(dtype, n, 2)),
                     w = weighted ? m.of({width}, dtype, normals_in(dtype, width, 4)) : Tensor(),
                     apart = m.empty(shape, dtype), sum = m.of(shape, dtype, old),
                     onto = m.of(shape, dtype, old), alone = m.of(shape, dtype, old),
                     dw = width < 2000 ? m.empty({width}, dtype) : Tensor(),
                     dw_too = dw ? m.empty({width}, dtype) : Tensor();
        m.kernels.fill(mean, 0.25);
        m.kernels.fill(rstd, 0.75);
        const auto differentiate = [&](const Tensor& dx, const Tensor& dweight, bool onto_dx) {
          if (layer)
            m.kernels.layer_norm_backward(x, w, mean, rstd, dy, dx, dweight, {}, false, onto_dx);
          else
            m.kernels.rms_norm_backward(x, w, rstd, dy, dx, dweight, false, onto_dx);
        };
        differentiate(apart, dw, false);
        m.kernels.add(sum, apart, sum);
        differentiate(onto, dw_too, true);
        differentiate(alone, {}, true);
        EXPECT_EQ(bytes(m, onto), bytes(m, sum));
        EXPECT_EQ(bytes(m, alone), bytes(m, sum));
        if (dw) {
          EXPECT_EQ(bytes(m, dw_too), bytes(m, dw));
        }
        if (HasFailure()) return;
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
