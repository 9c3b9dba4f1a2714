#include <gtest/gtest.h>

#include <limits>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Attention of a batch to keys that come in parts, each seen by the rows from `first` on.
struct Parts {
  std::int64_t batch, seq, heads, dim;
  std::vector<std::int64_t> first, keys;
};

/// The softmax of one row of one head over some keys, in double.
struct RowSoftmax {
  std::vector<double> out;
  double lse = -infinity;
};

/// Scores and values are functions of where they are.
RowSoftmax softmax_over(const Parts& p, std::int64_t row_of_head, std::int64_t b, std::int64_t h,
                        std::int64_t first_key, std::int64_t last_key, RowSoftmax before = {}) {
  RowSoftmax s = std::move(before);
  if (s.out.empty()) s.out.assign(static_cast<std::size_t>(p.dim), 0);
  for (std::int64_t key = first_key; key < last_key; ++key) {
    const auto place = static_cast<std::uint64_t>(row_of_head * 1000 + key);
    const double score = static_cast<double>(normal_at({3, 1}, place));
    const double lse = s.lse == -infinity ? score : std::log(std::exp(s.lse) + std::exp(score));
    for (std::int64_t d = 0; d < p.dim; ++d) {
      const double value = static_cast<double>(
          normal_at({3, 2}, static_cast<std::uint64_t>(((b * p.heads + h) * 1000 + key) * p.dim + d)));
      double& sum = s.out[static_cast<std::size_t>(d)];
      sum = (s.lse == -infinity ? 0 : sum * std::exp(s.lse - lse)) + value * std::exp(score - lse);
    }
    s.lse = lse;
  }
  return s;
}

/// The attention to part `which`, or with `all` to it and all parts before it: out [batch, rows, width] and
/// lse [batch, heads, rows] of the rows from `first` on.
void merged_expected(const Parts& p, std::size_t which, bool all, std::int64_t first,
                     std::vector<double>& out, std::vector<double>& lse) {
  const std::int64_t rows = p.seq - first;
  out.assign(static_cast<std::size_t>(p.batch * rows * p.heads * p.dim), 0);
  lse.assign(static_cast<std::size_t>(p.batch * p.heads * rows), 0);
  for (std::int64_t b = 0; b < p.batch; ++b)
    for (std::int64_t h = 0; h < p.heads; ++h)
      for (std::int64_t r = 0; r < rows; ++r) {
        RowSoftmax s;
        std::int64_t key = 0;
        for (std::size_t part = 0; part <= which; key += p.keys[part++])
          if ((all || part == which) && first + r >= p.first[part])
            s = softmax_over(p, (b * p.heads + h) * p.seq + first + r, b, h, key, key + p.keys[part], s);
        lse[static_cast<std::size_t>((b * p.heads + h) * rows + r)] = s.lse;
        for (std::int64_t d = 0; d < p.dim; ++d)
          out[static_cast<std::size_t>(((b * rows + r) * p.heads + h) * p.dim + d)] =
              s.out[static_cast<std::size_t>(d)];
      }
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << what << " " << i;
}

class MergeAttention : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, MergeAttention, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(MergeAttention, of_several_parts_is_one_softmax) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  const double tolerance = dtype == DType::f32 ? 1e-6 : dtype == DType::f64 ? 1e-14 : 4 * roundoff(dtype);
  for (const Parts& p :
       {Parts{1, 1, 1, 1, {0, 0}, {1, 2}}, Parts{2, 9, 3, 5, {0, 4, 0, 8}, {4, 3, 6, 1}},
        Parts{3, 6, 2, 16, {0, 3, 3}, {5, 1, 7}}, Parts{2, 70, 5, 67, {0, 0, 35}, {3, 4, 2}}}) {
    on_every_machine(
        [&](Machine& m) {
          const Tensor out = m.empty({p.batch, p.seq, p.heads * p.dim}, compute),
                       lse = m.empty({p.batch, p.heads, p.seq}, compute);
          m.kernels.fill(out, std::numeric_limits<double>::quiet_NaN());  // `begin` reads none of it
          m.kernels.fill(lse, std::numeric_limits<double>::quiet_NaN());
          for (std::size_t part = 0; part < p.keys.size(); ++part) {
            std::vector<double> o, l;
            merged_expected(p, part, false, p.first[part], o, l);
            const std::int64_t rows = p.seq - p.first[part];
            m.kernels.merge_attention(m.of({p.batch, rows, p.heads * p.dim}, dtype, o),
                                      m.of({p.batch, p.heads, rows}, compute, l), p.first[part], part == 0,
                                      out, lse);
          }
          return std::vector<Tensor>{out, lse};
        },
        [&](const std::vector<Tensor>& got) {
          std::vector<double> out, lse;
          merged_expected(p, p.keys.size() - 1, true, 0, out, lse);
          expect_near(values_of(got[0]), out, tolerance, "out");
          expect_near(values_of(got[1]), lse, compute == DType::f64 ? 1e-14 : 1e-6, "lse");
        });
    if (HasFatalFailure()) return;
  }
}

TEST_P(MergeAttention, begins_with_some_rows_and_leaves_the_others) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  const std::vector<double> part = normals_in(dtype, 2 * 3 * 8, 1), lse = normals_in(compute, 2 * 2 * 3, 2);
  on_every_machine(
      [&](Machine& m) {
        const Tensor out = m.of({2, 5, 8}, compute, std::vector<double>(80, 7)),
                     sums = m.of({2, 2, 5}, compute, std::vector<double>(20, 7));
        m.kernels.merge_attention(m.of({2, 3, 8}, dtype, part), m.of({2, 2, 3}, compute, lse), 1, true, out,
                                  sums);
        return std::vector<Tensor>{out, sums};
      },
      [&](const std::vector<Tensor>& got) {
        std::vector<double> out(80, 7), sums(20, 7);
        for (std::size_t b = 0; b < 2; ++b)
          for (std::size_t r = 0; r < 3; ++r) {
            for (std::size_t i = 0; i < 8; ++i) out[(b * 5 + 1 + r) * 8 + i] = part[(b * 3 + r) * 8 + i];
            for (std::size_t h = 0; h < 2; ++h) sums[(b * 2 + h) * 5 + 1 + r] = lse[(b * 2 + h) * 3 + r];
          }
        EXPECT_EQ(values_of(got[0]), out);
        EXPECT_EQ(values_of(got[1]), sums);
      },
      Alike::to_the_bit);
}

/// One row of one head of five elements, merged part by part.
struct Step {
  double value, lse;
  bool begin;
  double want, want_lse;
};

void expect_steps(const std::vector<Step>& steps) {
  for (const DType dtype : floating_dtypes) {
    const DType compute = dtype == DType::f64 ? DType::f64 : DType::f32;
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      // A sequence that begins reads nothing of what was there.
      const Tensor out = m.of({1, 1, 5}, compute, std::vector<double>(5, 77)),
                   lse = m.of({1, 1, 1}, compute, {77});
      for (const Step& step : steps) {
        m.kernels.merge_attention(m.of({1, 1, 5}, dtype, std::vector<double>(5, step.value)),
                                  m.of({1, 1, 1}, compute, {step.lse}), 0, step.begin, out, lse);
        for (const double got : values_of(m.host(out)))
          if (std::isnan(step.want))
            EXPECT_TRUE(std::isnan(got)) << m.name();
          else
            EXPECT_EQ(got, step.want) << m.name();
        const double got = values_of(m.host(lse))[0];
        EXPECT_TRUE(got == step.want_lse || (std::isnan(got) && std::isnan(step.want_lse)))
            << got << " for " << step.want_lse << " on " << m.name();
      }
    }
  }
}

TEST(MergeAttentionExtremes, parts_without_keys_change_nothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_steps({{nan, -infinity, true, 0, -infinity},
                {nan, -infinity, false, 0, -infinity},
                {1.5, -3, false, 1.5, -3},
                {nan, -infinity, false, 1.5, -3}});
}

TEST(MergeAttentionExtremes, very_low_sums_have_no_weight_and_equal_ones_the_same) {
  expect_steps({{4, -0x1p100, true, 4, -0x1p100},
                {3, -0x1p100, false, 3.5, -0x1p100},  // each a half; the sum's ln 2 is lost
                {1.5, -3, false, 1.5, -3},
                {7, -0x1p100, false, 1.5, -3},
                {9, 0x1p100, false, 9, 0x1p100}});
}

TEST(MergeAttentionExtremes, what_is_no_number_shows) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_steps({{1.5, -3, true, 1.5, -3}, {2, nan, false, nan, nan}});
  expect_steps({{nan, nan, true, nan, nan}, {2, 1, false, nan, nan}});
}

TEST(MergeAttentionErrors, name_the_shapes) {
  Machine m(CpuIsa::portable, 1);
  const auto f32 = [&](const Shape& shape) { return m.empty(shape, DType::f32); };
  const Tensor part = f32({2, 3, 8}), lse = f32({2, 2, 3}), out = f32({2, 5, 8}), sums = f32({2, 2, 5});
  using testing::expect_error;
  const auto merge = [&](const Tensor& p, const Tensor& l, std::int64_t first, const Tensor& o,
                         const Tensor& s) {
    return [&m, p, l, first, o, s] { m.kernels.merge_attention(p, l, first, false, o, s); };
  };
  m.kernels.merge_attention(part, lse, 2, true, out, sums);
  expect_error(ErrorKind::usage, "rows 3 to 6 are not among 5", merge(part, lse, 3, out, sums));
  expect_error(ErrorKind::usage, "rows -1 to 2", merge(part, lse, -1, out, sums));
  expect_error(ErrorKind::usage, "rows of 8 do not hold 3 heads", merge(part, lse, 0, out, f32({2, 3, 5})));
  expect_error(ErrorKind::usage, "part_lse must have 12 elements", merge(part, f32({2, 2, 4}), 0, out, sums));
  expect_error(ErrorKind::usage, "out is fp32 [2, 5, 4]", merge(part, lse, 0, f32({2, 5, 4}), sums));
  expect_error(ErrorKind::usage, "lse must have 20 elements", merge(part, lse, 0, out, f32({1, 2, 5})));
  expect_error(ErrorKind::usage, "must be fp32", merge(part, lse, 0, m.empty({2, 5, 8}, DType::bf16), sums));
}

}  // namespace
}  // namespace sherd::test
