#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

using tensor::ExactSum;

TEST(Fold, rounds_what_is_given_alone_and_the_sum_once) {
  for (const DType from : {DType::f32, DType::bf16, DType::f16})
    for (const DType rounding : {DType::f32, DType::bf16, DType::f16})
      for (const DType to : {DType::f32, DType::bf16, DType::f16})
        for (const std::int64_t n : {0, 1, 33, 40007}) {
          const std::vector<double> given = normals_in(from, n, 1, 100), old = normals_in(to, n, 9);
          on_every_machine(
              [&](Machine& m) {
                Tensor fresh = m.empty({n}, to), added = m.of({n}, to, old);
                m.kernels.fold(m.of({n}, from, given), rounding, fresh, false);
                m.kernels.fold(m.of({n}, from, given), rounding, added, true);
                return std::vector<Tensor>{fresh, added};
              },
              [&](const std::vector<Tensor>& got) {
                std::vector<double> fresh, added;
                for (std::size_t i = 0; i < old.size(); ++i) {
                  const double value = rounded(given[i], rounding);
                  fresh.push_back(rounded(value, to));
                  added.push_back(rounded(
                      static_cast<double>(static_cast<float>(old[i]) + static_cast<float>(value)), to));
                }
                EXPECT_EQ(values_of(got[0]), fresh);
                EXPECT_EQ(values_of(got[1]), added);
              },
              Alike::to_the_bit);
          if (HasFatalFailure()) return;
        }
}

TEST(Fold, takes_any_address_and_its_output_as_its_input) {
  const std::int64_t n = 1003;
  for (const DType from : {DType::f32, DType::bf16})
    for (const std::int64_t at : {0, 1, 2}) {
      const std::vector<double> given = normals_in(from, n + 3, 4);
      on_every_machine(
          [&](Machine& m) {
            const Tensor x = m.of({n + 3}, from, given).range(at, n + at);
            Tensor bf16 = m.empty({n + 3}, DType::bf16).range(2 - at, n + 2 - at),
                   in_place = m.empty({n}, from);
            m.kernels.fold(x, DType::f32, bf16, false);
            m.kernels.copy(x, in_place);
            m.kernels.fold(in_place, DType::f16, in_place, false);
            return std::vector<Tensor>{bf16, in_place};
          },
          [&](const std::vector<Tensor>& got) {
            std::vector<double> bf16, in_place;
            for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
              const double value = given[i + static_cast<std::size_t>(at)];
              bf16.push_back(rounded(value, DType::bf16));
              in_place.push_back(rounded(rounded(value, DType::f16), from));
            }
            EXPECT_EQ(values_of(got[0]), bf16);
            EXPECT_EQ(values_of(got[1]), in_place);
          },
          Alike::to_the_bit);
    }
}

TEST(Fold, takes_fp64_and_names_what_does_not_fit) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    SCOPED_TRACE(m.name());
    const Tensor from = m.of({2}, DType::f64, {1.0 / 3, 1 + 0x1p-9}), to = m.of({2}, DType::f64, {0.25, 1});
    m.kernels.fold(from, DType::f64, to, true);
    EXPECT_EQ(values_of(m.host(to)), (std::vector<double>{0.25 + 1.0 / 3, 2 + 0x1p-9}));
    m.kernels.fold(from, DType::bf16, to, false);
    EXPECT_EQ(values_of(m.host(to)), (std::vector<double>{0.333984375, 1}));
    testing::expect_error(ErrorKind::usage, "from must have 2 elements",
                          [&] { m.kernels.fold(m.empty({3}, DType::f64), DType::f64, to, false); });
    testing::expect_error(ErrorKind::usage, "cannot round to int32",
                          [&] { m.kernels.fold(from, DType::i32, to, false); });
  }
}

TEST(SumRows, adds_rows_within_rounding) {
  for (const DType dtype : floating_dtypes)
    for (const bool wide : {false, true})
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 33}, Shape{517, 40}, Shape{2, 300, 7}, Shape{130, 520},
                                 Shape{20000, 3}, Shape{0, 5}}) {
        const DType out_type = wide && dtype != DType::f64 ? DType::f32 : dtype;
        const std::int64_t n = shape.back(), rows = shape.rows();
        const std::vector<double> x = normals_in(dtype, shape.numel(), 1), old = normals_in(out_type, n, 2);
        on_every_machine(
            [&](Machine& m) {
              Tensor fresh = m.empty({n}, out_type), added = m.of({n}, out_type, old);
              m.kernels.sum_rows(m.of(shape, dtype, x), fresh, false);
              m.kernels.sum_rows(m.of(shape, dtype, x), added, true);
              return std::vector<Tensor>{fresh, added};
            },
            [&](const std::vector<Tensor>& got) {
              std::vector<double> fresh(static_cast<std::size_t>(n)), added = old;
              for (std::int64_t row = 0; row < rows; ++row)
                for (std::size_t i = 0; i < fresh.size(); ++i)
                  fresh[i] += x[static_cast<std::size_t>(row * n) + i];
              for (std::size_t i = 0; i < fresh.size(); ++i) added[i] += fresh[i];
              const double magnitude = std::sqrt(static_cast<double>(rows)) * 20 + 4;
              expect_close(values_of(got[0]), fresh, out_type, 4, magnitude, "sum_rows");
              expect_close(values_of(got[1]), added, out_type, 4, magnitude, "sum_rows, accumulating");
            });
        if (HasFatalFailure()) return;
      }
}

TEST(SumOfSquares, does_not_depend_on_threads_cuts_or_instruction_set) {
  for (const DType dtype : floating_dtypes) {
    const std::int64_t n = 100003;
    const std::vector<double> x = normals_in(dtype, n, 1, 3);
    long double want = 0;
    for (const double value : x) want += static_cast<long double>(value) * static_cast<long double>(value);
    double first = -1;
    std::vector<std::int64_t> words;
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      const Tensor t = m.of({n}, dtype, x);
      ExactSum whole, forth, back, together;
      m.kernels.sum_of_squares(t, whole);
      const std::int64_t cuts[] = {0, 64, 6400, 32768, 70016, n};
      for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
        m.kernels.sum_of_squares(t.range(cuts[i], cuts[i + 1]), forth);
        const std::size_t k = std::size(cuts) - 2 - i;
        m.kernels.sum_of_squares(t.range(cuts[k], cuts[k + 1]), back);
      }
      m.kernels.sums_of_squares(std::vector<Tensor>{t.range(32768, n), t.range(0, 0), t.range(0, 32768)},
                                together);
      if (first < 0) first = whole.value();
      EXPECT_EQ(whole.value(), first) << m.name();
      EXPECT_EQ(forth.value(), first) << m.name();
      EXPECT_EQ(back.value(), first) << m.name();
      if (words.empty()) words = whole.to_words();
      EXPECT_EQ(whole.to_words(), words) << m.name();
      EXPECT_EQ(forth.to_words(), words) << m.name();
      EXPECT_EQ(together.to_words(), words) << m.name();
      EXPECT_NEAR(whole.value(), static_cast<double>(want), static_cast<double>(want) * 1e-14);
    }
  }
}

TEST(SumOfSquares, counts_what_is_not_finite) {
  for (const DType dtype : floating_dtypes)
    for (const double bad :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
      for (const auto& machine : all_machines()) {
        std::vector<double> x(40000, 1);
        x[39999] = bad;
        ExactSum sum;
        machine->kernels.sum_of_squares(machine->of({40000}, dtype, x), sum);
        EXPECT_GT(sum.non_finite, 0);
        EXPECT_TRUE(std::isnan(sum.value()));
      }
}

TEST(ExactSumProperties, order_and_grouping_do_not_change_the_digits) {
  std::mt19937_64 generator(3);
  std::vector<double> terms;
  for (int i = 0; i < 4000; ++i)
    terms.push_back(std::ldexp(1.0 + static_cast<double>(generator() >> 12) * 0x1p-52,
                               static_cast<int>(generator() % 500) - 250));
  ExactSum forward;
  for (const double term : terms) forward.add(term);
  for (int trial = 0; trial < 5; ++trial) {
    std::shuffle(terms.begin(), terms.end(), generator);
    ExactSum total;
    for (std::size_t begin = 0; begin < terms.size();) {
      ExactSum group;
      const std::size_t end = std::min(terms.size(), begin + 1 + generator() % 700);
      for (; begin < end; ++begin) group.add(terms[begin]);
      total.add(group);
    }
    EXPECT_EQ(total.value(), forward.value());
  }
}

TEST(ExactSumProperties, many_terms_at_once_add_up_to_the_same) {
  std::mt19937_64 generator(4);
  const double inf = std::numeric_limits<double>::infinity();
  const auto term = [&](int spread, int around) {
    return std::ldexp(1.0 + static_cast<double>(generator() >> 12) * 0x1p-52,
                      around + static_cast<int>(generator() % static_cast<unsigned>(spread)));
  };
  for (const int around : {-1050, -300, -250, -40, 0, 60, 200, 380, 430, 900})
    for (const int spread : {1, 20, 63, 64, 65, 120})
      for (const std::size_t count : {0u, 1u, 511u, 2048u, 5000u}) {
        std::vector<double> terms;
        for (std::size_t i = 0; i < count; ++i) terms.push_back(i % 97 == 5 ? 0.0 : term(spread, around));
        if (count > 500 && spread == 20) terms[17] = term(1, 100), terms[400] = 0x1p-1060;
        if (count > 500 && spread == 63)
          terms[18] = inf, terms[19] = -1, terms[20] = std::nan(""), terms[21] = -0.0;
        ExactSum one_by_one, at_once;
        for (const double t : terms) one_by_one.add(t);
        at_once.add(terms);
        EXPECT_EQ(at_once.to_words(), one_by_one.to_words()) << around << ", " << spread << ", " << count;
      }
  std::vector<double> largest(2048, std::nextafter(0x1p64, 0));  // every bit of the sum's 128 is needed
  largest[0] = 1;
  ExactSum one_by_one, at_once;
  for (const double t : largest) one_by_one.add(t);
  at_once.add(largest);
  EXPECT_EQ(at_once.to_words(), one_by_one.to_words());
}

TEST(ExactSumProperties, keeps_what_doubles_lose) {
  ExactSum sum;
  sum.add(0x1p60);
  for (int i = 0; i < 1 << 12; ++i) sum.add(0x1p-4);
  EXPECT_EQ(sum.value(), 0x1p60 + 256);
  ExactSum tiny;
  for (int i = 0; i < 1024; ++i) tiny.add(0x1p-290);
  EXPECT_EQ(tiny.value(), 0x1p-280);
  EXPECT_EQ(ExactSum{}.value(), 0);
}

TEST(ExactSumProperties, refuses_to_hide_a_bad_term) {
  for (const double bad :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), 1e200}) {
    ExactSum sum, other;
    sum.add(1);
    sum.add(bad);
    EXPECT_EQ(sum.non_finite, 1);
    other.add(sum);
    EXPECT_TRUE(std::isnan(other.value()));
  }
}

}  // namespace
}  // namespace sherd::test
