#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

constexpr std::int32_t ignored = -100;

using Columns = std::vector<std::int64_t>;

struct LossReference {
  double loss = 0, counted = 0;
  std::vector<double> lse, gradient;
};

LossReference cross_entropy(const std::vector<double>& logits, const std::vector<std::int32_t>& targets,
                            std::int64_t ids, double factor) {
  LossReference out;
  out.gradient.resize(logits.size());
  for (std::size_t r = 0; r < targets.size(); ++r) {
    const double* row = logits.data() + r * static_cast<std::size_t>(ids);
    const double top = *std::max_element(row, row + ids);
    double sum = 0;
    for (std::int64_t i = 0; i < ids; ++i) sum += std::exp(row[i] - top);
    const bool counts = targets[r] != ignored;
    const double lse = counts ? top + std::log(sum) : 0;
    out.lse.push_back(lse);
    if (!counts) continue;
    out.loss += lse - row[targets[r]];
    out.counted += 1;
    for (std::int64_t i = 0; i < ids; ++i)
      out.gradient[r * static_cast<std::size_t>(ids) + static_cast<std::size_t>(i)] =
          (std::exp(row[i] - lse) - (i == targets[r])) * factor;
  }
  return out;
}

/// The largest logit of each row that counts among [first, first + columns) of `ids`, 0 for others.
std::vector<double> largest(const std::vector<double>& logits, const std::vector<std::int32_t>& targets,
                            std::int64_t ids, std::int64_t first, std::int64_t columns, double none) {
  std::vector<double> out;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    double most = none;
    for (std::int64_t i = first; i < std::min(ids, first + columns); ++i)
      most = std::max(most, logits[r * static_cast<std::size_t>(ids) + static_cast<std::size_t>(i)]);
    out.push_back(targets[r] == ignored ? 0 : most);
  }
  return out;
}

/// Columns [first, first + columns) of `rows` rows of `ids` values; `beyond` behind the last.
std::vector<double> cut(const std::vector<double>& values, std::size_t rows, std::int64_t ids,
                        std::int64_t first, std::int64_t columns, double beyond) {
  std::vector<double> out;
  for (std::size_t r = 0; r < rows; ++r)
    for (std::int64_t i = first; i < first + columns; ++i)
      out.push_back(i < ids ? values[r * static_cast<std::size_t>(ids) + static_cast<std::size_t>(i)]
                            : beyond);
  return out;
}

/// The results of ranks that hold so many columns each: the total and the log-sum-exp, each part's
/// gradient, and the largest logits of parts. Padding is infinite: it must not matter, whatever it holds.
std::vector<Tensor> loss_of_parts(Machine& m, DType dtype, const std::vector<double>& logits,
                                  const std::vector<std::int32_t>& targets, std::int64_t ids,
                                  const Columns& parts, double factor) {
  const DType compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto rows = static_cast<std::int64_t>(targets.size()),
             count = static_cast<std::int64_t>(parts.size());
  const Tensor lse = m.empty({count, rows}, compute), picked = m.empty({count, rows}, compute),
               most = m.empty({count, rows}, compute), lse_all = m.empty({rows}, compute),
               total = m.empty({2}, DType::f64);
  const Tensor t = m.ids({rows}, targets);
  std::vector<Tensor> out{total, lse_all};
  std::vector<tensor::VocabSlice> slices;
  std::int64_t first = 0;
  for (std::int64_t p = 0; p < count; ++p) {
    const std::int64_t columns = parts[static_cast<std::size_t>(p)];
    slices.push_back({first, ids});
    out.push_back(
        m.of({rows, columns}, dtype,
             cut(logits, targets.size(), ids, first, columns, std::numeric_limits<double>::infinity())));
    m.kernels.cross_entropy(out.back(), t, slices.back(), ignored, lse.rows(p, p + 1), picked.rows(p, p + 1),
                            most.rows(p, p + 1));
    first += columns;
  }
  m.kernels.cross_entropy_total(lse, picked, t, ignored, lse_all, total, false);
  for (std::size_t p = 0; p < parts.size(); ++p)
    m.kernels.cross_entropy_backward(out[2 + p], t, lse_all, slices[p], ignored,
                                     m.of({1}, p % 2 ? DType::f64 : DType::f32, {factor}));
  out.push_back(most);
  return out;
}

class CrossEntropy : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, CrossEntropy, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(CrossEntropy, of_any_parts_agrees_with_double_arithmetic_and_across_machines) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  const struct {
    int rows;
    std::int64_t ids;
    Columns parts;
  } cases[] = {
      {1, 1, {1}},
      {5, 7, {7}},
      {40, 31, {33}},
      {9, 5000, {5003}},
      {3, 50257, {50257}},
      {6, 7, {5, 5}},
      {7, 5000, {1667, 3333}},  // padding behind the last, none at all
      {9, 3001, {17, 2501, 701}},
      {40, 31, {9, 11, 13, 20}},  // the last part is all padding
      {4, 3, {2, 2, 2, 2}},
  };
  for (const auto& [rows, ids, parts] : cases) {
    const std::vector<double> logits = normals_in(dtype, rows * ids, 1, 4);
    std::vector<std::int32_t> targets;
    for (int r = 0; r < rows; ++r)
      targets.push_back(rows > 4 && r % 5 == 2 ? ignored : static_cast<std::int32_t>((r + 1) * 977 % ids));
    const double factor = 96;
    const LossReference want = cross_entropy(logits, targets, ids, factor);
    SCOPED_TRACE(cat(rows, " rows of ", ids, " in ", parts.size(), " parts"));
    on_every_machine(
        [&, ids = ids, parts = parts](Machine& m) {
          return loss_of_parts(m, dtype, logits, targets, ids, parts, factor);
        },
        [&, ids = ids, parts = parts](const std::vector<Tensor>& got) {
          const std::vector<double> total = values_of(got[0]);
          EXPECT_EQ(total[1], want.counted);
          expect_close({total[0] / total[1]}, {want.loss / want.counted}, compute, 4, 20, "loss");
          expect_close(values_of(got[1]), want.lse, compute, 4, 4, "lse");
          // exp turns the rounding of the log-sum-exp, which is below 20, into an error of the probability.
          std::int64_t first = 0;
          for (std::size_t p = 0; p < parts.size(); first += parts[p++])
            expect_close(values_of(got[2 + p]), cut(want.gradient, targets.size(), ids, first, parts[p], 0),
                         dtype, 24, factor, cat("gradient of part ", p));
          const double none = compute == DType::f64
                                  ? std::numeric_limits<double>::lowest()
                                  : static_cast<double>(std::numeric_limits<float>::lowest());
          std::vector<double> most;
          first = 0;
          for (const std::int64_t columns : parts) {
            const auto of_part = largest(logits, targets, ids, first, columns, none);
            most.insert(most.end(), of_part.begin(), of_part.end());
            first += columns;
          }
          EXPECT_EQ(values_of(got.back()), most);
        });
    if (HasFatalFailure()) return;
  }
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

TEST(CrossEntropyCases, survive_masked_and_extreme_logits) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines())
      for (const Columns& parts : {Columns{5000}, Columns{2500, 2500}, Columns{3999, 2, 999}}) {
        Machine& m = *machine;
        SCOPED_TRACE(cat(m.name(), ", ", name_of(dtype), ", ", parts.size(), " parts"));
        // The first columns are masked out entirely; the target towers over the rest.
        std::vector<double> row(5000, -inf);
        row[4000] = 60000, row[4500] = -60000;
        const std::vector<Tensor> got = loss_of_parts(m, dtype, row, {4000}, 5000, parts, 1);
        EXPECT_EQ(values_of(m.host(got[0])), (std::vector<double>{0, 1}));
        for (std::size_t p = 0; p < parts.size(); ++p)
          EXPECT_EQ(values_of(m.host(got[2 + p])),
                    std::vector<double>(static_cast<std::size_t>(parts[p]), 0));

        // NaN anywhere reaches the loss.
        for (const std::size_t place : {0u, 17u, 4999u}) {
          std::vector<double> bad(5000, place == 17 ? -inf : 1.0);
          bad[place] = std::numeric_limits<double>::quiet_NaN();
          const Tensor total = loss_of_parts(m, dtype, bad, {3000}, 5000, parts, 1)[0];
          EXPECT_TRUE(std::isnan(values_of(m.host(total))[0])) << "at " << place;
        }
      }
}

TEST(CrossEntropyCases, without_a_target_have_no_loss_and_no_gradient) {
  for (const DType dtype : floating_dtypes)
    for (const auto& m : one_of_each()) {
      const auto got = loss_of_parts(*m, dtype, {1, 2, 3, 4, 5, 6}, {ignored, ignored}, 3, {2, 2}, 1);
      EXPECT_EQ(values_of(m->host(got[0])), (std::vector<double>{0, 0})) << m->name();
      for (const std::size_t p : {2u, 3u})
        EXPECT_EQ(values_of(m->host(got[p])), std::vector<double>(4, 0)) << m->name();
    }
}

TEST(CrossEntropyCases, of_parts_keep_the_digits_of_small_gradients) {
  // A target whose probability is near 1 alone in one part, and its rivals in the other.
  const std::vector<double> rivals{std::exp(-30.0), std::exp(-31.0), std::exp(-32.0)};
  for (const auto& m : one_of_each()) {
    const auto got = loss_of_parts(*m, DType::f32, {0, -30, -31, -32}, {0}, 4, {1, 3}, 1);
    expect_close(values_of(m->host(got[3])), rivals, DType::f32, 4, 0, m->name());
    const double sum = rivals[0] + rivals[1] + rivals[2];
    EXPECT_NEAR(values_of(m->host(got[2]))[0], -sum, 1e-2 * sum) << m->name();
    EXPECT_NEAR(values_of(m->host(got[0]))[0], sum, 1e-2 * sum) << m->name();
  }
}

TEST(CrossEntropyTotal, adds_chunks_of_rows_and_takes_the_first_part_as_the_sum) {
  for (const auto& each : one_of_each()) {
    Machine& m = *each;
    const Tensor lse = m.of({2, 3}, DType::f32, {1, 2, 0, 1, -50, 0}),
                 picked = m.of({2, 3}, DType::f32, {0, 0.5, 0, 0.25, 0, 0}), total = m.empty({2}, DType::f64),
                 targets = m.ids({3}, {4, 1, ignored});
    m.kernels.fill(total, 10);
    m.kernels.cross_entropy_total(lse, picked, targets, ignored, lse.rows(0, 1), total, true);
    const std::vector<double> all = values_of(m.host(lse.rows(0, 1)));
    expect_close(all, {1 + std::log(2.0), 2, 0}, DType::f32, 1, 0, m.name());
    EXPECT_EQ(values_of(m.host(total)), (std::vector<double>{10 + (all[0] - 0.25) + (all[1] - 0.5), 12}));
    m.kernels.cross_entropy_total(m.empty({0}, DType::f64), m.empty({0}, DType::f64), m.ids({0}, {}), ignored,
                                  m.empty({0}, DType::f64), total, false);
    EXPECT_EQ(values_of(m.host(total)), (std::vector<double>{0, 0}));
  }
}

TEST(CrossEntropyErrors, name_the_target_its_position_and_the_vocabulary) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({2, 10}, DType::f32), lse = m.empty({2}, DType::f32),
               picked = m.empty({2}, DType::f32), factor = m.of({1}, DType::f32, {1});
  using testing::expect_error;
  for (const std::int64_t first : {0, 5, 10})
    for (const std::int32_t bad : {8, 10, -1}) {
      const std::string what = cat("target id ", bad, " at position 1 of [2] is outside the vocabulary of 8");
      const Tensor targets = m.ids({2}, {0, bad});
      expect_error(ErrorKind::data, what, [&] {
        m.kernels.cross_entropy(x, targets, {first, 8}, ignored, lse, picked, {});
      });
      expect_error(ErrorKind::data, what, [&] {
        m.kernels.cross_entropy_backward(x, targets, lse, {first, 8}, ignored, factor);
      });
    }
  expect_error(ErrorKind::usage, "targets must be int32 with 2 elements",
               [&] { m.kernels.cross_entropy(x, m.ids({1}, {0}), {}, ignored, lse, picked, {}); });
  expect_error(ErrorKind::usage, "a part of the vocabulary from id -1", [&] {
    m.kernels.cross_entropy(x, m.ids({2}, {0, 1}), {-1, 8}, ignored, lse, picked, {});
  });
  expect_error(ErrorKind::usage, "the factor must be one number", [&] {
    m.kernels.cross_entropy_backward(x, m.ids({2}, {0, 1}), lse, {}, ignored, lse);
  });
  expect_error(ErrorKind::usage, "lse is [3] and must have 2 elements for each part", [&] {
    const Tensor three = m.empty({3}, DType::f32);
    m.kernels.cross_entropy_total(three, three, m.ids({2}, {0, 1}), ignored, lse, m.empty({2}, DType::f64),
                                  false);
  });
}

TEST(CrossEntropyErrors, come_with_the_next_wait_where_kernels_run_on_their_own) {
  for (const auto& each : one_of_each()) {
    if (each->family == "cpu") continue;
    Machine& m = *each;
    Tensor x = m.of({3, 2}, DType::f32, {1, 1, 7, 7, 3, 3}), picked = m.empty({3}, DType::f32),
           lse = m.empty({3}, DType::f32);
    using testing::expect_error;
    for (const std::int64_t first : {0, 2, 7}) {  // whatever the rank holds
      const std::int64_t ids = std::max<std::int64_t>(first, 2);
      const Tensor targets = m.ids({3}, {1, static_cast<std::int32_t>(ids), ignored});
      m.kernels.cross_entropy(x, targets, {first, ids}, ignored, lse, picked, {});
      expect_error(ErrorKind::data, cat("target ", ids, " at position 1 is outside [0, ", ids, ")"),
                   [&] { m.settle(); });
      m.kernels.cross_entropy_backward(x, targets, lse, {first, ids}, ignored, m.of({1}, DType::f32, {1}));
      expect_error(ErrorKind::data, cat("target ", ids, " at position 1"), [&] { m.settle(); });
      m.settle();
    }
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

TEST(BinaryCrossEntropy, agrees_with_double_arithmetic_and_across_machines) {
  for (const DType dtype : floating_dtypes)
    for (const std::int64_t n : {0, 1, 31, 33, 70001})
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(cat(n, " of ", name_of(dtype), weighted ? ", weighted" : ""));
        std::vector<double> x = normals_in(dtype, n, 1, 6), t = normals_in(dtype, n, 2),
                            w = normals_in(dtype, n, 3);
        for (std::size_t i = 0; i < t.size(); ++i)
          t[i] = i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : rounded(sigmoid(t[i]), dtype), w[i] = std::fabs(w[i]);
        on_every_machine(
            [&](Machine& m) {
              const Tensor a = m.of({n}, dtype, x), b = m.of({n}, dtype, t), total = m.empty({2}, DType::f64),
                           dx = m.empty({n}, dtype), weights = weighted ? m.of({n}, dtype, w) : Tensor();
              m.kernels.binary_cross_entropy(a, b, weights, total);
              m.kernels.binary_cross_entropy_backward(a, b, weights, m.of({1}, DType::f64, {2.5}), dx);
              return std::vector<Tensor>{total, dx};
            },
            [&](const std::vector<Tensor>& got) {
              std::vector<double> total(2), dx;
              for (std::size_t i = 0; i < x.size(); ++i) {
                const double by = weighted ? w[i] : 1;  // the two logarithms as the definition has them
                total[0] -= by * ((t[i] > 0 ? t[i] * -std::log1p(std::exp(-x[i])) : 0) +
                                  (t[i] < 1 ? (1 - t[i]) * -std::log1p(std::exp(x[i])) : 0));
                total[1] += by;
                dx.push_back(2.5 * by * (sigmoid(x[i]) - t[i]));
              }
              const double unit = dtype == DType::f64 ? 1 : 0x1p29;  // terms are formed in fp32
              expect_close(values_of(got[0]), total, DType::f64, 1e3 + 4 * unit, 1, "total");
              expect_close(values_of(got[1]), dx, dtype, 8, 16, "dx");
            });
        if (HasFatalFailure()) return;
      }
}

TEST(BinaryCrossEntropy, keeps_the_digits_of_sure_answers) {
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    const Tensor total = m.empty({2}, DType::f64);
    for (const double sure : {-30.0, 30.0}) {  // e^-30, next to which 1 and 30 are large
      m.kernels.binary_cross_entropy(m.of({1}, DType::f32, {sure}),
                                     m.of({1}, DType::f32, {sure > 0 ? 1.0 : 0.0}), {}, total);
      EXPECT_NEAR(values_of(m.host(total))[0] / std::exp(-30), 1, 1e-6) << m.name();
    }
    m.kernels.binary_cross_entropy(m.of({2}, DType::f32, {-1e30, 1e30}), m.of({2}, DType::f32, {1, 0}), {},
                                   total);
    EXPECT_NEAR(values_of(m.host(total))[0], 2e30, 1e24) << m.name();
  }
}

}  // namespace
}  // namespace sherd::test
