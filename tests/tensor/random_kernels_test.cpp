#include <gtest/gtest.h>

#include <cstring>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

const RandomKey key = RandomKey{0x123456789abcdefull, 42}.at(3).at(1);

TEST(Dropout, keeps_exactly_the_elements_of_the_stream_and_rescales_them) {
  for (const DType dtype : floating_dtypes)
    for (const float p : {0.0f, 0.1f, 0.5f, 0.999f})
      for (const std::int64_t n : {0, 1, 5, 63, 64, 65, 70001}) {
        const std::vector<double> x = normals_in(dtype, n, 1), residual = normals_in(dtype, n, 2, 4);
        on_every_machine(
            [&](Machine& m) {
              Tensor alone = m.empty({n}, dtype), added = m.empty({n}, dtype), in_place = m.of({n}, dtype, x);
              m.kernels.dropout(in_place, {}, p, key, alone);
              m.kernels.dropout(in_place, m.of({n}, dtype, residual), p, key, added);
              m.kernels.dropout_backward(in_place, p, key, in_place);
              return std::vector<Tensor>{alone, added, in_place};
            },
            [&](const std::vector<Tensor>& got) {
              std::vector<double> alone(x.size()), added(x.size());
              std::size_t kept = 0;
              for (std::size_t i = 0; i < x.size(); ++i) {
                const bool keep = uniform_at(key, i) >= p;
                kept += keep;
                alone[i] = keep ? x[i] / (1 - static_cast<double>(p)) : 0;
                added[i] = residual[i] + alone[i];
              }
              expect_close(values_of(got[0]), alone, dtype, 3, 0, "dropout");
              expect_close(values_of(got[1]), added, dtype, 3, p > 0.9f ? 4000 : 8, "dropout with residual");
              EXPECT_EQ(values_of(got[0]), values_of(got[2])) << "backward";
              if (n > 60000) {
                EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(n), 1 - p, 0.01);
              }
            },
            Alike::to_the_bit);
        if (HasFatalFailure()) return;
      }
}

TEST(Dropout, of_some_elements_has_the_mask_of_all) {
  for (const DType dtype : floating_dtypes)
    for (const std::uint64_t first : {1ull, 2ull, 3ull, 4ull, 7ull, 4099ull, (1ull << 34) - 5})
      for (const std::int64_t n : {0, 1, 2, 3, 5, 66, 33001}) {
        if (n > 1000 && first > 4) continue;
        const std::vector<double> x = normals_in(dtype, n, 1), residual = normals_in(dtype, n, 2, 4);
        on_every_machine(
            [&](Machine& m) {
              const float p = 0.3f;
              Tensor alone = m.empty({n}, dtype), added = m.empty({n}, dtype), in_place = m.of({n}, dtype, x);
              m.kernels.dropout(in_place, {}, p, {key, first}, alone);
              m.kernels.dropout(in_place, m.of({n}, dtype, residual), p, {key, first}, added);
              m.kernels.dropout_backward(in_place, p, {key, first}, in_place);
              return std::vector<Tensor>{alone, added, in_place};
            },
            [&](const std::vector<Tensor>& got) {
              std::vector<double> alone(x.size()), added(x.size());
              for (std::size_t i = 0; i < x.size(); ++i) {
                alone[i] = uniform_at(key, first + i) >= 0.3f ? x[i] / (1 - static_cast<double>(0.3f)) : 0;
                added[i] = residual[i] + alone[i];
              }
              expect_close(values_of(got[0]), alone, dtype, 3, 0, "dropout");
              expect_close(values_of(got[1]), added, dtype, 3, 8, "dropout with residual");
              EXPECT_EQ(values_of(got[0]), values_of(got[2])) << "backward";
            },
            Alike::to_the_bit);
        if (HasFatalFailure()) return;
      }
}

/// Cut anywhere, also where neither memory nor the stream is aligned.
TEST(Dropout, of_pieces_gives_the_bits_of_the_whole) {
  const std::int64_t n = 1031;
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines()) {
      const Tensor x = machine->of({n}, dtype, normals_in(dtype, n, 1)), whole = machine->empty({n}, dtype),
                   pieces = machine->empty({n}, dtype);
      machine->kernels.dropout(x, x, 0.4f, key, whole);
      for (std::int64_t begin = 0, size = 1; begin < n; begin += size++) {
        const std::int64_t end = std::min(n, begin + size);
        machine->kernels.dropout(x.range(begin, end), x.range(begin, end), 0.4f,
                                 {key, static_cast<std::uint64_t>(begin)}, pieces.range(begin, end));
      }
      EXPECT_EQ(values_of(machine->host(pieces)), values_of(machine->host(whole))) << machine->name();
    }
}

TEST(Dropout, a_dropped_infinity_leaves_zero) {
  for (const auto& machine : all_machines()) {
    Tensor x = machine->empty({1000}, DType::bf16), y = machine->empty({1000}, DType::bf16);
    machine->kernels.fill(x, std::numeric_limits<double>::infinity());
    machine->kernels.dropout(x, {}, 0.5f, key, y);
    for (const double value : values_of(machine->host(y))) EXPECT_TRUE(value == 0 || std::isinf(value));
  }
}

TEST(Dropout, refuses_probabilities_outside_zero_to_one) {
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({2}, DType::f32);
  for (const float p : {1.0f, -0.1f, std::numeric_limits<float>::quiet_NaN()})
    testing::expect_error(ErrorKind::usage, "dropout: the probability must be in [0, 1)",
                          [&] { m.kernels.dropout(x, {}, p, key, x); });
}

TEST(FillRandom, gives_the_stream_by_global_index_whatever_the_cut) {
  for (const DType dtype : floating_dtypes) {
    const std::int64_t n = 20011;
    on_every_machine(
        [&](Machine& m) {
          Tensor normal = m.empty({n}, dtype), uniform = m.empty({n}, dtype), pieces = m.empty({n}, dtype);
          m.kernels.fill_normal(normal, key, 0, 0.5, 0.02);
          m.kernels.fill_uniform(uniform, key, 7, -2, 3);
          for (std::int64_t begin = 0; begin < n; begin += 4099)
            m.kernels.fill_normal(pieces.range(begin, std::min(n, begin + 4099)), key, begin, 0.5, 0.02);
          return std::vector<Tensor>{normal, uniform, pieces};
        },
        [&](const std::vector<Tensor>& got) {
          const std::vector<double> normal = values_of(got[0]), uniform = values_of(got[1]);
          EXPECT_EQ(normal, values_of(got[2]));
          for (std::size_t i = 0; i < normal.size(); ++i) {
            const double z = 0.5 + 0.02 * static_cast<double>(normal_at(key, i));
            const double u = -2 + 5 * static_cast<double>(uniform_at(key, i + 7));
            ASSERT_EQ(normal[i], rounded(z, dtype)) << i;
            ASSERT_EQ(uniform[i], rounded(u, dtype)) << i;
          }
        });
    if (HasFatalFailure()) return;
  }
}

/// Vectors of numbers are made in another way than single ones (cpu/isa/normal.cpp).
TEST(FillRandom, gives_the_bits_of_single_numbers_in_long_streams) {
  const std::int64_t n = 1 << 20, first = (std::int64_t{4} << 32) - n / 2 + 1;
  on_every_machine(
      [&](Machine& m) {
        Tensor x = m.empty({n}, DType::f32);
        m.kernels.fill_normal(x, key, first, 0, 1);
        return std::vector<Tensor>{x};
      },
      [&](const std::vector<Tensor>& got) {
        const float* x = got[0].data<float>();
        for (std::int64_t i = 3; i + 4 <= n; i += 4) {
          const auto four = normal_block(key, static_cast<std::uint64_t>(first + i) / 4);
          ASSERT_EQ(std::memcmp(x + i, four.data(), sizeof four), 0) << i;
        }
      });
}

TEST(FillRandom, has_the_moments_it_claims) {
  Machine m(CpuIsa::portable, 3);
  Tensor x = m.empty({400000}, DType::f32);
  m.kernels.fill_normal(x, key, 0, 1, 3);
  double sum = 0, squares = 0, fourth = 0;
  for (const double v : values_of(x)) {
    const double z = (v - 1) / 3;
    sum += z, squares += z * z, fourth += z * z * z * z;
  }
  EXPECT_NEAR(sum / 400000, 0, 0.01);
  EXPECT_NEAR(squares / 400000, 1, 0.01);
  EXPECT_NEAR(fourth / 400000, 3, 0.1);
}

}  // namespace
}  // namespace sherd::test
