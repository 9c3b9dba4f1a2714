// Arrays of several axes: strided copies, operands that repeat, folds along an axis, softmax.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/argument_checks.h"

namespace sherd::test {
namespace {

using tensor::AxisExtents;
using tensor::Softmax;
using tensor::Strides;
using testing::expect_error;

/// Calls f(indices, flat index) for every element of a shape.
void each_index(const Shape& shape,
                const std::function<void(const std::vector<std::int64_t>&, std::size_t)>& f) {
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    std::vector<std::int64_t> at(static_cast<std::size_t>(shape.rank()));
    std::int64_t rest = i;
    for (int k = shape.rank() - 1; k >= 0; --k)
      at[static_cast<std::size_t>(k)] = rest % shape[k], rest /= shape[k];
    f(at, static_cast<std::size_t>(i));
  }
}

struct StridedCase {
  Shape shape;
  Strides strides;
  std::int64_t size;  ///< elements of the tensor that is read
};
const StridedCase strided_cases[] = {
    {{5}, {1}, 5},
    {{4, 7}, {7, 1}, 28},                              // as it lies
    {{7, 4}, {1, 7}, 28},                              // transposed
    {{3, 70, 41}, {70 * 41, 1, 70}, 3 * 70 * 41},      // matrices transposed, past a tile
    {{6, 5, 4, 3}, {12, 72, 3, 1}, 360},               // the two outer axes exchanged
    {{3, 4, 5, 6}, {1, 90, 18, 3}, 360},               // the last axis to the front
    {{4, 3, 5}, {1, 20, 4}, 60},                       // the first axis to the middle
    {{3, 5, 2}, {2, 0, 1}, 6},                         // repeated along the middle axis
    {{2, 9}, {1, 0}, 2},                               // and along the last
    {{2, 3, 2, 2, 3, 2}, {1, 2, 6, 12, 24, 72}, 144},  // all axes reversed
    {{1, 3, 1, 4}, {9, 4, 9, 1}, 12},                  // axes of one element
    {{0, 3}, {3, 1}, 0},
    {{300, 200}, {1, 300}, 60000}};

TEST(CopyStrided, gathers_what_lies_at_strides_in_any_dtype) {
  for (const StridedCase& c : strided_cases) {
    SCOPED_TRACE(c.shape.str());
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      const std::vector<double> x = normals_in(dtype, c.size, 3);
      std::vector<double> want(static_cast<std::size_t>(c.shape.numel()));
      each_index(c.shape, [&](const auto& at, std::size_t i) {
        want[i] = x[static_cast<std::size_t>(
            std::inner_product(at.begin(), at.end(), c.strides.begin(), std::int64_t{0}))];
      });
      on_every_machine(
          [&](Machine& m) {
            const Tensor out = m.empty(c.shape, dtype);
            m.kernels.copy_strided(m.of({c.size}, dtype, x), c.strides, out);
            return std::vector<Tensor>{out};
          },
          [&](const std::vector<Tensor>& got) { EXPECT_EQ(values_of(got[0]), want); }, Alike::to_the_bit);
    }
  }
}

TEST(CopyStrided, moves_bytes_and_says_what_does_not_fit) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor x = m.holding<std::uint8_t>({2, 3}, {1, 2, 3, 4, 5, 6}), y = m.empty({3, 2}, DType::u8);
    m.kernels.copy_strided(x, {1, 3}, y);
    const Tensor here = m.host(y);
    const std::uint8_t want[] = {1, 4, 2, 5, 3, 6};
    EXPECT_TRUE(std::equal(want, want + 6, here.data<std::uint8_t>())) << m.name();
    expect_error(ErrorKind::usage, "copy_strided: element 8 of 6 would be read for [3, 2]", [&] {
      m.kernels.copy_strided(x, {3, 2}, y);
    });
    expect_error(ErrorKind::usage, "copy_strided: stride -1 of axis 1 is negative", [&] {
      m.kernels.copy_strided(x, {3, -1}, y);
    });
    expect_error(ErrorKind::usage, "copy_strided: uint8 to fp32", [&] {
      m.kernels.copy_strided(x, {3, 1}, m.empty({2, 3}, DType::f32));
    });
  }
}

struct OperandCase {
  Shape a, b, out;
};
const OperandCase operand_cases[] = {{{3, 5}, {5}, {3, 5}},
                                     {{5}, {3, 5}, {3, 5}},
                                     {{3, 1}, {1, 5}, {3, 5}},
                                     {{2, 1, 4}, {3, 1}, {2, 3, 4}},
                                     {{2, 3, 1, 2}, {1, 3, 5, 1}, {2, 3, 5, 2}},
                                     {{1}, {6, 7}, {6, 7}},
                                     {{4, 3}, {1, 1, 1}, {1, 4, 3}},
                                     {{1}, {1, 1}, {1, 1}},
                                     {{1, 1}, {1}, {1, 1}},
                                     {{0, 3}, {3}, {0, 3}},
                                     {{40, 1500}, {1500}, {40, 1500}},
                                     {{70, 900}, {70, 1}, {70, 900}}};

TEST(Broadcast, operands_repeat_as_numpy_has_it) {
  using Kernel = void (tensor::Kernels::*)(const Tensor&, const Tensor&, const Tensor&);
  const std::pair<Kernel, double (*)(double, double)> kernels[] = {
      {&tensor::Kernels::add, [](double a, double b) { return a + b; }},
      {&tensor::Kernels::subtract, [](double a, double b) { return a - b; }},
      {&tensor::Kernels::multiply, [](double a, double b) { return a * b; }},
      {&tensor::Kernels::divide, [](double a, double b) { return a / b; }}};
  for (const OperandCase& c : operand_cases)
    for (const DType dtype : floating_dtypes) {
      SCOPED_TRACE(cat(c.a.str(), " and ", c.b.str(), " in ", name_of(dtype)));
      const std::vector<double> a = normals_in(dtype, c.a.numel(), 1), b = normals_in(dtype, c.b.numel(), 2);
      const auto at_of = [&](const Shape& from, const std::vector<std::int64_t>& at) {
        std::int64_t flat = 0;
        for (int k = 0; k < from.rank(); ++k)
          flat =
              flat * from[k] + (from[k] == 1 ? 0 : at[at.size() - static_cast<std::size_t>(from.rank() - k)]);
        return static_cast<std::size_t>(flat);
      };
      for (const auto& [kernel, f] : kernels) {
        std::vector<double> want(static_cast<std::size_t>(c.out.numel()));
        each_index(c.out, [&, f = f](const auto& at, std::size_t i) {
          want[i] = f(a[at_of(c.a, at)], b[at_of(c.b, at)]);
        });
        on_every_machine(
            [&, kernel = kernel](Machine& m) {
              const Tensor out = m.empty(c.out, dtype);
              (m.kernels.*kernel)(m.of(c.a, dtype, a), m.of(c.b, dtype, b), out);
              return std::vector<Tensor>{out};
            },
            [&](const std::vector<Tensor>& got) {
              expect_close(values_of(got[0]), want, dtype, 1, 0, "out");
            },
            Alike::to_the_bit);
        if (HasFatalFailure()) return;
      }
    }
}

TEST(Broadcast, says_what_does_not_repeat) {
  Machine m(CpuIsa::portable, 1);
  const Tensor a = m.empty({2, 3}, DType::f32), b = m.empty({2}, DType::f32);
  expect_error(ErrorKind::usage, "subtract: shapes differ: [2] and [2, 3]",
               [&] { m.kernels.subtract(a, b, a); });
  expect_error(ErrorKind::usage, "divide: shapes differ: [2, 3] and [2]", [&] { m.kernels.divide(a, b, b); });
  expect_error(ErrorKind::usage, "add: shapes differ: [4, 2] and [3]; extents must be equal", [&] {
    tensor::broadcast_shape("add", {4, 2}, {3});
  });
}

const AxisExtents axes[] = {{1, 1, 1},     {1, 9, 1},     {3, 5, 1}, {3, 5, 4},
                            {1, 7, 33},    {2, 70, 3},    {2, 0, 3}, {1, 70001, 1},
                            {2, 40000, 1}, {1, 300, 700}, {0, 4, 2}, {2, 130, 600}};

TEST(Folds, sum_along_an_axis_onto_what_was_there) {
  for (const AxisExtents& axis : axes)
    for (const DType dtype : floating_dtypes)
      for (const bool wide : {false, true})
        for (const bool accumulate : {false, true}) {
          const DType to = wide ? tensor::compute_type(dtype) : dtype;
          SCOPED_TRACE(cat(axis.outer, " x ", axis.extent, " x ", axis.inner, " of ", name_of(dtype)));
          const std::int64_t n = axis.kept() * axis.extent;
          const std::vector<double> x = normals_in(dtype, n, 4), before = normals_in(to, axis.kept(), 5);
          std::vector<double> want(before.size());
          double magnitude = 1;
          for (std::int64_t i = axis.kept() - 1; i >= 0; --i) {  // backwards: another order than the kernel's
            double sum = 0, sizes = 0;
            for (std::int64_t k = axis.extent - 1; k >= 0; --k) {
              const double v = x[static_cast<std::size_t>((i / axis.inner * axis.extent + k) * axis.inner +
                                                          i % axis.inner)];
              sum += v, sizes += std::fabs(v);
            }
            want[static_cast<std::size_t>(i)] =
                0.25 * sum + (accumulate ? before[static_cast<std::size_t>(i)] : 0);
            magnitude = std::max(magnitude, sizes);
          }
          on_every_machine(
              [&](Machine& m) {
                const Tensor out = m.of({axis.kept()}, to, before);
                m.kernels.sum_axis(m.of({n}, dtype, x), axis, 0.25, out, accumulate);
                return std::vector<Tensor>{out};
              },
              [&](const std::vector<Tensor>& got) {
                expect_close(values_of(got[0]), want, to, 8, magnitude, "sums");
              });
          if (HasFatalFailure()) return;
        }
}

TEST(Folds, sums_of_rows_are_those_of_sum_rows) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor x = m.of({500, 33}, DType::bf16, normals_in(DType::bf16, 500 * 33, 6));
    const Tensor a = m.empty({33}, DType::f32), b = m.empty({33}, DType::f32);
    m.kernels.sum_rows(x, a, false);
    m.kernels.sum_axis(x, {1, 500, 33}, 1, b, false);
    EXPECT_EQ(bytes(m, a), bytes(m, b)) << m.name();
  }
}

TEST(Folds, the_maximum_and_where_its_gradient_goes) {
  for (const AxisExtents& axis : axes) {
    if (axis.extent == 0) continue;
    for (const DType dtype : floating_dtypes) {
      SCOPED_TRACE(cat(axis.outer, " x ", axis.extent, " x ", axis.inner, " of ", name_of(dtype)));
      const std::int64_t n = axis.kept() * axis.extent;
      std::vector<double> x = normals_in(dtype, n, 7);
      for (double& v : x) v = std::floor(v * 2);  // many alike
      const std::vector<double> dy = normals_in(dtype, axis.kept(), 8);
      std::vector<double> top(dy.size()), dx(x.size());
      for (std::int64_t i = 0; i < axis.kept(); ++i) {
        const auto at = [&](std::int64_t k) {
          return static_cast<std::size_t>((i / axis.inner * axis.extent + k) * axis.inner + i % axis.inner);
        };
        std::int64_t best = axis.extent - 1;
        for (std::int64_t k = best; k >= 0; --k)
          if (x[at(k)] >= x[at(best)]) best = k;
        top[static_cast<std::size_t>(i)] = x[at(best)];
        dx[at(best)] = dy[static_cast<std::size_t>(i)];
      }
      on_every_machine(
          [&](Machine& m) {
            const Tensor in = m.of({n}, dtype, x), out = m.empty({axis.kept()}, dtype),
                         slopes = m.empty({n}, dtype);
            m.kernels.max_axis(in, axis, out);
            m.kernels.max_axis_backward(in, out, m.of({axis.kept()}, dtype, dy), axis, slopes);
            return std::vector<Tensor>{out, slopes};
          },
          [&](const std::vector<Tensor>& got) {
            EXPECT_EQ(values_of(got[0]), top);
            EXPECT_EQ(values_of(got[1]), dx);
          },
          Alike::to_the_bit);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Folds, a_nan_is_the_maximum) {
  const double nan = std::nan("");
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor x = m.of({2, 3}, DType::f32, {1, nan, 2, 5, -1, 5}), y = m.empty({2}, DType::f32),
                 dx = m.empty({2, 3}, DType::f32);
    m.kernels.max_axis(x, {2, 3, 1}, y);
    m.kernels.max_axis_backward(x, y, m.of({2}, DType::f32, {7, 8}), {2, 3, 1}, dx);
    EXPECT_TRUE(std::isnan(values_of(m.host(y))[0])) << m.name();
    EXPECT_EQ(values_of(m.host(dx)), (std::vector<double>{0, 7, 0, 8, 0, 0})) << m.name();
  }
}

struct SoftmaxCase {
  std::int64_t rows, columns;
  bool log = false, hides = false;
  std::int64_t causal_rows = 0;
  double scale = 1;
  std::int64_t distance_rows = 0;  ///< rows that distances tell apart
};
const SoftmaxCase softmax_cases[] = {{1, 1},
                                     {3, 7},
                                     {5, 33, true},
                                     {4, 1030},
                                     {2, 3001, true, false, 0, 0.5},
                                     {6, 12, false, true},
                                     {8, 9, false, false, 4, -2},
                                     {9, 1500, false, true, 3, 0.125},
                                     {7, 3, false, false, 7},
                                     {6, 11, false, false, 0, 1, 3},
                                     {8, 1030, false, true, 4, 0.5, 4},
                                     {2, 5, false, false, 0, 2, 1}};

/// Softmax and its gradient by hand, columns from the last to the first.
std::pair<std::vector<double>, std::vector<double>> softmax_by_hand(const SoftmaxCase& c,
                                                                    const std::vector<double>& x,
                                                                    const std::vector<std::uint8_t>& seen,
                                                                    const std::vector<double>& distances,
                                                                    const std::vector<double>& dy) {
  std::vector<double> y(x.size()), dx(x.size());
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const auto at = [&](std::int64_t i) { return static_cast<std::size_t>(row * c.columns + i); };
    const auto visible = [&](std::int64_t i) {
      return (!c.hides || seen[static_cast<std::size_t>(i)]) &&
             (c.causal_rows == 0 || i <= row % c.causal_rows);
    };
    const auto score = [&](std::int64_t i) {
      const std::int64_t r = c.distance_rows;
      return c.scale * x[at(i)] + (r == 0 ? 0 : distances[static_cast<std::size_t>(i - row % r + r - 1)]);
    };
    double sum = 0, slope = 0;
    for (std::int64_t i = c.columns - 1; i >= 0; --i)
      if (visible(i)) sum += std::exp(score(i));
    for (std::int64_t i = 0; i < c.columns; ++i) {
      y[at(i)] = !visible(i) ? 0 : c.log ? score(i) - std::log(sum) : std::exp(score(i)) / sum;
      slope += c.log ? dy[at(i)] : y[at(i)] * dy[at(i)];
    }
    for (std::int64_t i = 0; i < c.columns; ++i)
      dx[at(i)] = c.scale * (c.log ? dy[at(i)] - std::exp(y[at(i)]) * slope : y[at(i)] * (dy[at(i)] - slope));
  }
  return {y, dx};
}

TEST(Softmax, and_its_gradient_of_scaled_and_masked_rows) {
  for (const SoftmaxCase& c : softmax_cases)
    for (const DType dtype : floating_dtypes)
      for (const bool wide : {false, true}) {
        const DType from = wide ? tensor::compute_type(dtype) : dtype;
        SCOPED_TRACE(cat(c.rows, " x ", c.columns, ", ", name_of(from), " to ", name_of(dtype)));
        const std::int64_t n = c.rows * c.columns;
        const std::vector<double> x = normals_in(from, n, 9, 3), dy = normals_in(from, n, 10);
        std::vector<std::uint8_t> seen(static_cast<std::size_t>(c.columns));
        for (std::size_t i = 0; i < seen.size(); ++i)
          seen[i] = i % 3 != 0;  // and a first row that sees nothing
        const DType of_distances = tensor::compute_type(dtype);
        const std::vector<double> distances = normals_in(of_distances, c.columns + c.distance_rows, 11);
        const auto [y, dx] = softmax_by_hand(c, x, seen, distances, dy);
        on_every_machine(
            [&, y = y](Machine& m) {
              Softmax args{.scale = c.scale, .log = c.log, .seen = {}, .causal_rows = c.causal_rows};
              if (c.hides) args.seen = m.holding(Shape{c.columns}, seen);
              if (const std::int64_t count = c.columns + c.distance_rows - 1; c.distance_rows > 0)
                args.distances = m.of({count}, of_distances, {distances.begin(), distances.begin() + count});
              const Shape shape{c.rows, c.columns};
              const Tensor out = m.empty(shape, dtype), slopes = m.empty(shape, dtype);
              m.kernels.softmax(m.of(shape, from, x), args, out);
              m.kernels.softmax_backward(m.of(shape, dtype, y), m.of(shape, from, dy), args, slopes);
              return std::vector<Tensor>{out, slopes};
            },
            [&, y = y, dx = dx](const std::vector<Tensor>& got) {
              expect_close(values_of(got[0]), y, dtype, 40, c.log ? 10 : 0.0, "softmax");
              const double rounding = dtype == DType::f64 ? 1 : roundoff(dtype) / 0x1p-24;  // of y, in dx
              expect_close(values_of(got[1]), dx, dtype, 8 + 4 * rounding, 6, "gradient");
            });
        if (HasFatalFailure()) return;
      }
}

TEST(Softmax, gives_zeros_where_nothing_is_seen_and_stays_where_it_is) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      const Tensor x = m.of({3, 2}, dtype, {-inf, -inf, -inf, 1, 1e4, 1e4});
      m.kernels.softmax(x, {}, x);
      EXPECT_EQ(values_of(m.host(x)), (std::vector<double>{0, 0, 0, 1, 0.5, 0.5})) << m.name();
      const Tensor hidden = m.holding<std::uint8_t>({2}, {0, 0});
      m.kernels.softmax(x, {.seen = hidden}, x);
      EXPECT_EQ(values_of(m.host(x)), std::vector<double>(6, 0.0)) << m.name();

      // Logarithms keep the digits that a large offset, added to them first, would round away.
      const Tensor far = m.of({2, 2}, dtype, {-inf, -inf, 1e4, 1e4});
      m.kernels.softmax(far, {.log = true}, far);
      const double half = std::log(0.5);
      expect_close(values_of(m.host(far)), {0, 0, half, half}, dtype, 4, 1, m.name());
    }
}

TEST(Softmax, says_what_does_not_fit) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({2, 3}, DType::f32), y = m.empty({3, 2}, DType::f32);
  expect_error(ErrorKind::usage, "softmax: x is fp32 [2, 3] and y fp32 [3, 2]",
               [&] { m.kernels.softmax(x, {}, y); });
  expect_error(ErrorKind::usage, "seen must have 3 elements, not [2]",
               [&] { m.kernels.softmax(x, {.seen = m.empty({2}, DType::u8)}, x); });
  expect_error(ErrorKind::usage, "no value for hidden columns",
               [&] { m.kernels.softmax(x, {.log = true, .causal_rows = 2}, x); });
}

}  // namespace
}  // namespace sherd::test
