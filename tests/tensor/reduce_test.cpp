#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "support/expect_error.h"
#include "support/kernel_machines.h"

namespace sherd::test {
namespace {

using tensor::ExactSum;

TEST(SumRanks, adds_in_order_in_fp32_and_rounds_once) {
  for (const DType source : {DType::f32, DType::bf16, DType::f16})
    for (const DType rounding : {DType::f32, DType::bf16, DType::f16})
      for (const DType out_type : {DType::f32, DType::bf16, DType::f16})
        for (const std::int64_t n : {0, 1, 33, 40007}) {
          std::vector<std::vector<double>> parts;
          for (std::uint64_t r = 0; r < 3; ++r) parts.push_back(normals_in(source, n, r, r == 1 ? 100 : 1));
          const std::vector<double> old = normals_in(out_type, n, 9);
          on_every_machine(
              [&](Machine& m) {
                std::vector<Tensor> sources;
                for (const auto& part : parts) sources.push_back(m.of({n}, source, part));
                Tensor fresh = m.empty({n}, out_type), added = m.of({n}, out_type, old);
                m.kernels.sum_ranks(sources, 1.0 / 3, rounding, fresh, false);
                m.kernels.sum_ranks(sources, 1.0 / 3, rounding, added, true);
                return std::vector<Tensor>{fresh, added};
              },
              [&](const std::vector<Tensor>& got) {
                std::vector<double> fresh, added;
                for (std::size_t i = 0; i < old.size(); ++i) {
                  float sum = static_cast<float>(parts[0][i]) + static_cast<float>(parts[1][i]);
                  sum = (sum + static_cast<float>(parts[2][i])) * static_cast<float>(1.0 / 3);
                  const double value = rounded(static_cast<double>(sum), rounding);
                  fresh.push_back(rounded(value, out_type));
                  added.push_back(rounded(
                      static_cast<double>(static_cast<float>(old[i]) + static_cast<float>(value)), out_type));
                }
                EXPECT_EQ(values_of(got[0]), fresh);
                EXPECT_EQ(values_of(got[1]), added);
              },
              Alike::to_the_bit);
          if (HasFatalFailure()) return;
        }
}

TEST(SumRanks, takes_fp64_and_an_output_among_its_sources) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    SCOPED_TRACE(m.name());
    const std::vector<Tensor> wide{m.of({2}, DType::f64, {1, 1e-12}), m.of({2}, DType::f64, {0.25, 1})};
    Tensor out = m.empty({2}, DType::f64);
    m.kernels.sum_ranks(wide, 2, DType::f64, out, false);
    EXPECT_EQ(values_of(m.host(out)), (std::vector<double>{2.5, 2 * (1e-12 + 1)}));
    m.kernels.sum_ranks(wide, 2, DType::bf16, wide[0], true);
    EXPECT_EQ(values_of(m.host(wide[0])), (std::vector<double>{3.5, 1e-12 + 2}));
    testing::expect_error(ErrorKind::usage, "there are no sources",
                          [&] { m.kernels.sum_ranks({}, 1, DType::f32, out, false); });
    const std::vector<Tensor> narrow{m.empty({3}, DType::f64)};
    testing::expect_error(ErrorKind::usage, "a source must have 2 elements",
                          [&] { m.kernels.sum_ranks(narrow, 1, DType::f64, out, false); });
  }
}

TEST(SumRanks, takes_many_sources_of_several_types_at_any_address) {
  const std::int64_t n = 1003;
  for (const DType out_type : {DType::f32, DType::bf16})
    on_every_machine(
        [&](Machine& m) {
          std::vector<Tensor> sources;
          for (std::uint64_t r = 0; r < 130; ++r) {
            const DType dtype = r % 5 == 3 ? DType::f32 : DType::bf16;
            sources.push_back(m.of({n + 3}, dtype, normals_in(dtype, n + 3, r)).range(r % 3, n + r % 3));
          }
          Tensor mixed = m.empty({n}, out_type), alike = m.empty({n}, out_type);
          m.kernels.sum_ranks(sources, 0.5, DType::f32, mixed, false);
          m.kernels.sum_ranks(std::vector(100, sources[1]), 0.5, DType::f32, alike, false);
          return std::vector<Tensor>{mixed, alike};
        },
        [&](const std::vector<Tensor>& got) {
          std::vector<float> sum(n), same(n);
          for (std::uint64_t r = 0; r < 130; ++r) {
            const std::vector<double> part = normals_in(r % 5 == 3 ? DType::f32 : DType::bf16, n + 3, r);
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<float>(part[i + r % 3]);
            if (r == 1)
              for (int k = 0; k < 100; ++k)
                for (std::size_t i = 0; i < same.size(); ++i) same[i] += static_cast<float>(part[i + 1]);
          }
          std::vector<double> mixed, alike;
          for (const float value : sum) mixed.push_back(rounded(static_cast<double>(value * 0.5f), out_type));
          for (const float value : same)
            alike.push_back(rounded(static_cast<double>(value * 0.5f), out_type));
          EXPECT_EQ(values_of(got[0]), mixed);
          EXPECT_EQ(values_of(got[1]), alike);
        },
        Alike::to_the_bit);
}

TEST(SumRows, adds_rows_within_rounding) {
  for (const DType dtype : floating_dtypes)
    for (const bool wide : {false, true})
      for (const Shape& shape :
           {Shape{1, 1}, Shape{3, 33}, Shape{517, 40}, Shape{2, 300, 7}, Shape{20000, 3}, Shape{0, 5}}) {
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
      m.kernels.sum_of_squares(std::vector<Tensor>{t.range(32768, n), t.range(0, 0), t.range(0, 32768)},
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

TEST(AllFinite, finds_one_bad_element_anywhere) {
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      EXPECT_TRUE(m.kernels.all_finite(m.empty({0}, dtype)));
      std::vector<double> x(70001, dtype == DType::f16 ? 65504 : 3e38);
      ASSERT_TRUE(m.kernels.all_finite(m.of({70001}, dtype, x))) << m.name();
      for (const std::size_t place : {0u, 15u, 32768u, 69999u, 70000u})
        for (const double bad :
             {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
              std::numeric_limits<double>::quiet_NaN()}) {
          const double good = std::exchange(x[place], bad);
          EXPECT_FALSE(m.kernels.all_finite(m.of({70001}, dtype, x))) << m.name() << " at " << place;
          x[place] = good;
        }
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
