#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

using tensor::StridedRows;

/// Where rows lie in a tensor of as many elements as they reach, and three more.
struct Side {
  std::int64_t first, stride;
  std::int64_t size(std::int64_t rows, std::int64_t columns) const {
    return first + (rows - 1) * stride + columns + 3;
  }
};
struct RowsCase {
  std::int64_t rows, columns;
  Side from, to;
};
/// Gaps on either side or none, rows shorter and longer than vectors and chunks, odd starts, one row for all.
const RowsCase small_cases[] = {{1, 1, {0, 1}, {0, 1}},     {3, 5, {2, 7}, {1, 9}},
                                {7, 64, {8, 72}, {16, 64}}, {4, 33, {0, 33}, {5, 33}},
                                {6, 16, {4, 0}, {0, 20}},   {2, 1500, {1, 1600}, {3, 1500}},
                                {19, 3, {0, 3}, {0, 8}},    {2, 301, {16, 304}, {8, 312}}};
const RowsCase large_cases[] = {{1, 70001, {0, 0}, {1, 0}},
                                {30000, 3, {1, 4}, {2, 5}},
                                {4, 40000, {0, 40000}, {0, 40000}},
                                {3, 40001, {8, 40008}, {16, 40064}}};

/// The destination when rows of x went into what was `before` there.
std::vector<double> rows_by_hand(const RowsCase& c, const std::vector<double>& x, std::vector<double> before,
                                 bool accumulate) {
  for (std::int64_t row = 0; row < c.rows; ++row)
    for (std::int64_t i = 0; i < c.columns; ++i) {
      double& to = before[static_cast<std::size_t>(c.to.first + row * c.to.stride + i)];
      to = (accumulate ? to : 0) + x[static_cast<std::size_t>(c.from.first + row * c.from.stride + i)];
    }
  return before;
}

void expect_rows(const RowsCase& c, DType from, DType to, bool accumulate) {
  SCOPED_TRACE(cat(c.rows, " rows of ", c.columns, ", ", name_of(from), accumulate ? " added to " : " to ",
                   name_of(to)));
  const std::int64_t n = c.from.size(c.rows, c.columns), m = c.to.size(c.rows, c.columns);
  const std::vector<double> x = normals_in(from, n, 1), before = normals_in(to, m, 2);
  on_every_machine(
      [&](Machine& machine) {
        const Tensor out = machine.of({m}, to, before);
        machine.kernels.copy_rows({machine.of({n}, from, x), c.from.first, c.from.stride},
                                  {out, c.to.first, c.to.stride}, c.rows, c.columns, accumulate);
        return std::vector<Tensor>{out};
      },
      [&](const std::vector<Tensor>& got) {
        const std::vector<double> want = rows_by_hand(c, x, before, accumulate);
        expect_close(values_of(got[0]), want, to, accumulate ? 1 : 0, 0, "copy_rows");
      },
      Alike::to_the_bit);
}

TEST(CopyRows, move_convert_and_add_between_all_floating_types_and_leave_what_lies_between) {
  for (const DType from : floating_dtypes)
    for (const DType to : floating_dtypes)
      for (const bool accumulate : {false, true})
        for (const RowsCase& c : small_cases) {
          expect_rows(c, from, to, accumulate);
          if (HasFatalFailure()) return;
        }
}

TEST(CopyRows, take_large_tensors_in_chunks) {
  for (const RowsCase& c : large_cases)
    for (const auto& [from, to, accumulate] : {std::tuple{DType::bf16, DType::bf16, false},
                                               {DType::bf16, DType::f32, true},
                                               {DType::f32, DType::f16, false},
                                               {DType::f64, DType::bf16, true}}) {
      expect_rows(c, from, to, accumulate);
      if (HasFatalFailure()) return;
    }
}

TEST(CopyRows, round_once) {
  // 1 + 2^-8 + 2^-40 lies above the middle of two bf16 numbers; by way of fp32 it would lie on it and go
  // down.
  const double above = 1 + 0x1p-8 + 0x1p-40;
  for (const auto& machine : one_of_each()) {
    Machine& m = *machine;
    const Tensor x = m.holding<double>({1}, {above}), out = m.of({3}, DType::bf16, {0, 0, 1});
    m.kernels.copy_rows({x}, {out}, 1, 1);
    const Tensor rest = m.holding<double>({1}, {above - 1});
    m.kernels.copy_rows({rest}, {out, 2}, 1, 1, true);
    EXPECT_EQ(values_of(m.host(out)), (std::vector<double>{1 + 0x1p-7, 0, 1 + 0x1p-7})) << m.name();
  }
}

TEST(CopyRows, take_integers_and_any_bits) {
  std::vector<std::int32_t> ids(4 * 7);
  std::iota(ids.begin(), ids.end(), -5);
  const float nan = std::bit_cast<float>(0x7fa12345u);  // a signalling one keeps its bits
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor out = m.ids({3, 2}, std::vector<std::int32_t>(6, 99));
    m.kernels.copy_rows({m.ids({4, 7}, ids), 7 + 3, 7}, {out, 0, 2}, 3, 2);
    const Tensor here = m.host(out);
    const std::int32_t want[] = {5, 6, 12, 13, 19, 20};
    EXPECT_TRUE(std::equal(want, want + 6, here.data<std::int32_t>())) << m.name();
    const Tensor bits = m.empty({1}, DType::f32);
    m.kernels.copy_rows({m.holding<float>({1}, {nan})}, {bits}, 1, 1);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(m.host(bits).data<float>()[0]), 0x7fa12345u) << m.name();
    m.kernels.copy_rows({out}, {out}, 0, 9);  // nothing
    m.kernels.copy_rows({out}, {out}, 9, 0);
  }
}

TEST(CopyRows, say_what_does_not_fit) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({10}, DType::f32), ids = m.empty({10}, DType::i32);
  using testing::expect_error;
  const auto copy = [&](const StridedRows& from, const StridedRows& to, std::int64_t rows,
                        std::int64_t columns, bool accumulate = false) {
    return [&m, from, to, rows, columns, accumulate] {
      m.kernels.copy_rows(from, to, rows, columns, accumulate);
    };
  };
  expect_error(ErrorKind::usage, "2 rows of 3, from element 2 on in steps of 6, do not fit from",
               copy({x, 2, 6}, {x, 0, 3}, 2, 3));
  expect_error(ErrorKind::usage, "do not fit to", copy({x, 0, 3}, {x, 5, 3}, 2, 3));
  expect_error(ErrorKind::usage, "do not fit to", copy({x, 0, 3}, {x, 0, 2}, 2, 3));  // rows on each other
  expect_error(ErrorKind::usage, "do not fit from", copy({x, -1, 3}, {x, 0, 3}, 2, 3));
  expect_error(ErrorKind::usage, "fp32 cannot become int32", copy({x}, {ids}, 1, 1));
  expect_error(ErrorKind::usage, "int32 cannot be added to int32", copy({ids}, {ids, 5}, 1, 1, true));
  expect_error(ErrorKind::usage, "to is not defined", copy({x}, {}, 1, 1));
}

TEST(AddScaled, multiplies_by_a_number_of_the_device) {
  for (const DType from : floating_dtypes)
    for (const DType to : floating_dtypes)
      for (const bool wide : {false, true})
        for (const bool accumulate : {false, true})
          for (const std::int64_t n : {0, 1, 77, 40003}) {
            if (n > 100 && (from != DType::f32 || wide)) continue;
            SCOPED_TRACE(cat(n, " of ", name_of(from), accumulate ? " added to " : " to ", name_of(to)));
            const std::vector<double> x = normals_in(from, n, 1), before = normals_in(to, n, 2);
            on_every_machine(
                [&](Machine& m) {
                  const Tensor out = m.of({n}, to, before);
                  m.kernels.add_scaled(m.of({n}, from, x), m.of({1}, wide ? DType::f64 : DType::f32, {-0.3f}),
                                       out, accumulate);
                  return std::vector<Tensor>{out};
                },
                [&](const std::vector<Tensor>& got) {
                  std::vector<double> want(before);
                  for (std::size_t i = 0; i < want.size(); ++i)
                    want[i] = (accumulate ? want[i] : 0) + x[i] * static_cast<double>(-0.3f);
                  const bool f64 = from == DType::f64 || to == DType::f64;
                  expect_close(values_of(got[0]), want, to, 2, f64 && to == DType::f64 ? 1 : 4, "add_scaled");
                },
                Alike::to_the_bit);
            if (HasFatalFailure()) return;
          }
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({2}, DType::f32), three = m.empty({3}, DType::f32);
  testing::expect_error(ErrorKind::usage, "differ in their number",
                        [&] { m.kernels.add_scaled(three, x, x, true); });
  testing::expect_error(ErrorKind::usage, "the factor must be one number",
                        [&] { m.kernels.add_scaled(x, x, x, true); });
}

TEST(Quotient, divides_in_double_and_gives_zero_for_zero) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    for (const DType a : {DType::f32, DType::f64})
      for (const DType b : {DType::f32, DType::f64})
        for (const DType to : {DType::f32, DType::f64}) {
          const Tensor out = m.empty({1}, to), three = m.of({1}, a, {3}), seven = m.of({1}, b, {7});
          m.kernels.quotient(three, seven, 0.1, out);
          EXPECT_EQ(values_of(m.host(out))[0], rounded(0.1 * 3.0 / 7.0, to)) << m.name();
          m.kernels.quotient(three, m.of({1}, b, {0}), 0.1, out);
          EXPECT_EQ(values_of(m.host(out))[0], 0) << m.name();
        }
  }
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({1}, DType::f32), small = m.empty({1}, DType::bf16);
  testing::expect_error(ErrorKind::usage, "quotient: b must be one number",
                        [&] { m.kernels.quotient(x, small, 1, x); });
}

}  // namespace
}  // namespace sherd::test
