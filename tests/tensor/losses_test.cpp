#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/expect_error.h"
#include "support/kernel_machines.h"

namespace sherd::test {
namespace {

constexpr std::int32_t ignored = -100;

struct Reference {
  double loss = 0;
  std::vector<double> lse, gradient;
};

Reference cross_entropy(const std::vector<double>& logits, const std::vector<std::int32_t>& targets,
                        std::int64_t vocab, std::int64_t valid, double factor) {
  Reference out;
  out.gradient.resize(logits.size());
  double counted = 0;
  for (const std::int32_t target : targets) counted += target != ignored;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    const double* row = logits.data() + r * static_cast<std::size_t>(vocab);
    const double top = *std::max_element(row, row + valid);
    double sum = 0;
    for (std::int64_t i = 0; i < valid; ++i) sum += std::exp(row[i] - top);
    const double lse = top + std::log(sum);
    out.lse.push_back(lse);
    if (targets[r] == ignored) continue;
    out.loss += (lse - row[targets[r]]) / counted;
    for (std::int64_t i = 0; i < valid; ++i)
      out.gradient[r * static_cast<std::size_t>(vocab) + static_cast<std::size_t>(i)] =
          (std::exp(row[i] - lse) - (i == targets[r])) * factor / counted;
  }
  return out;
}

class CrossEntropy : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, CrossEntropy, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(CrossEntropy, loss_and_gradient_agree_with_double_arithmetic_and_across_machines) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const auto& [rows, vocab, valid] :
       {std::tuple{1, 1, 0}, {5, 7, 0}, {40, 33, 31}, {9, 5003, 5000}, {3, 50257, 0}}) {
    std::vector<double> logits = normals_in(dtype, static_cast<std::int64_t>(rows) * vocab, 1, 4);
    const std::int64_t columns = valid ? valid : vocab;
    for (std::int64_t r = 0; r < rows; ++r)  // padding must not matter, whatever it holds
      for (std::int64_t i = columns; i < vocab; ++i)
        logits[static_cast<std::size_t>(r * vocab + i)] = std::numeric_limits<double>::infinity();
    std::vector<std::int32_t> targets;
    for (int r = 0; r < rows; ++r)
      targets.push_back(rows > 4 && r % 5 == 2 ? ignored : static_cast<std::int32_t>(r * 977 % columns));
    const double factor = 1024;
    on_every_machine(
        [&, rows = rows, vocab = vocab, valid = valid](Machine& m) {
          Tensor x = m.of({rows, vocab}, dtype, logits), loss = m.empty({1}, compute),
                 lse = m.empty({rows}, compute);
          const Tensor t = m.ids({rows}, targets);
          m.kernels.cross_entropy(x, t, valid, ignored, loss, lse);
          m.kernels.cross_entropy_backward(x, t, lse, valid, ignored, m.of({1}, compute, {factor}));
          return std::vector<Tensor>{loss, lse, x};
        },
        [&, vocab = vocab](const std::vector<Tensor>& got) {
          const Reference want = cross_entropy(logits, targets, vocab, columns, factor);
          expect_close(values_of(got[0]), {want.loss}, compute, 4, 20, "loss");
          for (std::size_t r = 0; r < targets.size(); ++r)
            if (targets[r] != ignored)
              expect_close({values_of(got[1])[r]}, {want.lse[r]}, compute, 4, 4, "lse");
          // exp turns the rounding of the log-sum-exp, which is below 20, into an error of the probability.
          const double counted = static_cast<double>(std::count_if(
              targets.begin(), targets.end(), [](std::int32_t target) { return target != ignored; }));
          expect_close(values_of(got[2]), want.gradient, dtype, 20, factor / counted, "gradient");
        });
    if (HasFatalFailure()) return;
  }
}

TEST(CrossEntropyCases, survive_masked_and_extreme_logits) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      const DType compute = dtype == DType::f64 ? DType::f64 : DType::f32;
      // The first block of columns is masked out entirely; the target towers over the rest.
      std::vector<double> row(5000, -inf);
      row[4000] = 60000, row[4500] = -60000;
      Tensor x = m.of({1, 5000}, dtype, row), loss = m.empty({1}, compute), lse = m.empty({1}, compute);
      m.kernels.cross_entropy(x, m.ids({1}, {4000}), 0, ignored, loss, lse);
      EXPECT_EQ(values_of(m.host(loss))[0], 0) << m.name();
      m.kernels.cross_entropy_backward(x, m.ids({1}, {4000}), lse, 0, ignored, m.of({1}, compute, {1}));
      EXPECT_EQ(values_of(m.host(x)), std::vector<double>(5000, 0)) << m.name();

      // NaN anywhere reaches the loss.
      for (const std::size_t place : {0u, 17u, 4999u}) {
        std::vector<double> bad(5000, place == 17 ? -inf : 1.0);
        bad[place] = std::numeric_limits<double>::quiet_NaN();
        m.kernels.cross_entropy(m.of({1, 5000}, dtype, bad), m.ids({1}, {3000}), 0, ignored, loss, lse);
        EXPECT_TRUE(std::isnan(values_of(m.host(loss))[0])) << m.name() << " at " << place;
      }

      // No target at all: no loss and no gradient.
      Tensor y = m.of({2, 3}, dtype, {1, 2, 3, 4, 5, 6}), two = m.empty({2}, compute);
      const Tensor none = m.ids({2}, {ignored, ignored});
      m.kernels.cross_entropy(y, none, 0, ignored, loss, two);
      EXPECT_EQ(values_of(m.host(loss))[0], 0);
      m.kernels.cross_entropy_backward(y, none, two, 0, ignored, m.of({1}, compute, {1}));
      EXPECT_EQ(values_of(m.host(y)), std::vector<double>(6, 0));
    }
}

TEST(CrossEntropyErrors, name_the_target_its_position_and_the_vocabulary) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({2, 10}, DType::f32), lse = m.empty({2}, DType::f32),
               loss = m.empty({1}, DType::f32);
  using testing::expect_error;
  for (const std::int32_t bad : {8, 10, -1})
    expect_error(ErrorKind::data,
                 cat("target id ", bad, " at position 1 of [2] is outside the vocabulary of 8"), [&] {
                   m.kernels.cross_entropy(x, m.ids({2}, {0, bad}), 8, ignored, loss, lse);
                 });
  expect_error(ErrorKind::usage, "targets must be int32 with 2 elements",
               [&] { m.kernels.cross_entropy(x, m.ids({1}, {0}), 8, ignored, loss, lse); });
  expect_error(ErrorKind::usage, "11 valid columns of 10", [&] {
    m.kernels.cross_entropy(x, m.ids({2}, {0, 1}), 11, ignored, loss, lse);
  });
}

TEST(CrossEntropyErrors, come_with_the_next_wait_where_kernels_run_on_their_own) {
  for (const auto& each : one_of_each()) {
    if (each->family == "cpu") continue;
    Machine& m = *each;
    Tensor x = m.of({3, 2}, DType::f32, {1, 1, 7, 7, 3, 3}), loss = m.empty({1}, DType::f32),
           lse = m.empty({3}, DType::f32);
    const Tensor targets = m.ids({3}, {1, 2, ignored});
    using testing::expect_error;
    m.kernels.cross_entropy(x, targets, 0, ignored, loss, lse);
    expect_error(ErrorKind::data, "target 2 at position 1 is outside [0, 2)", [&] { m.settle(); });
    m.kernels.cross_entropy_backward(x, targets, lse, 0, ignored, m.of({1}, DType::f32, {1}));
    expect_error(ErrorKind::data, "target 2 at position 1", [&] { m.settle(); });
    m.settle();
  }
}

TEST(MeanSquaredError, agrees_with_double_arithmetic_and_across_machines) {
  for (const DType dtype : floating_dtypes)
    for (const std::int64_t n : {0, 1, 31, 33, 70001}) {
      const std::vector<double> x = normals_in(dtype, n, 1), y = normals_in(dtype, n, 2);
      const DType compute = dtype == DType::f64 ? DType::f64 : DType::f32;
      on_every_machine(
          [&](Machine& m) {
            Tensor loss = m.empty({1}, compute), dx = m.empty({n}, dtype);
            const Tensor a = m.of({n}, dtype, x), b = m.of({n}, dtype, y);
            m.kernels.mean_squared_error(a, b, loss);
            m.kernels.mean_squared_error_backward(a, b, m.of({1}, compute, {3.5 * static_cast<double>(n)}),
                                                  dx);
            return std::vector<Tensor>{loss, dx};
          },
          [&](const std::vector<Tensor>& got) {
            long double sum = 0;
            std::vector<double> dx;
            for (std::size_t i = 0; i < x.size(); ++i) {
              sum += static_cast<long double>(x[i] - y[i]) * static_cast<long double>(x[i] - y[i]);
              dx.push_back(7 * (x[i] - y[i]));
            }
            expect_close(values_of(got[0]), {n ? static_cast<double>(sum / n) : 0}, compute, 4, 4, "loss");
            expect_close(values_of(got[1]), dx, dtype, 4, 0, "dx");
          });
      if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace sherd::test
