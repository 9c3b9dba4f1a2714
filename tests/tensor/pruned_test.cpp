#include "tensor/formats/pruned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

using tensor::is_pruned;
using tensor::prune_two_of_four;

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> out(values.size());
  std::memcpy(out.data(), values.data(), values.size() * 4);
  return out;
}

void expect_pruned(std::vector<float> weights, const std::vector<float>& want) {
  prune_two_of_four(weights);
  EXPECT_EQ(bits_of(weights), bits_of(want));
}

TEST(Pruned, keeps_the_two_of_largest_magnitude_of_each_four) {
  expect_pruned({1, -3, 2, 0.5f, -0.1f, -0.4f, 0.3f, 0.2f}, {-0.f, -3, 2, -0.f, -0.f, -0.4f, 0.3f, -0.f});
  expect_pruned({}, {});
  constexpr float huge = std::numeric_limits<float>::infinity(),
                  nan = std::numeric_limits<float>::quiet_NaN();
  expect_pruned({5, -huge, nan, 6}, {-0.f, -huge, nan, -0.f});
}

/// The mask of any four numbers is found by sorting them.
TEST(Pruned, agrees_with_sorted_magnitudes) {
  std::vector<float> weights;
  for (const double x : normals_in(DType::f32, 4000, 3)) weights.push_back(static_cast<float>(x));
  std::vector<float> got = weights;
  prune_two_of_four(got);
  for (std::size_t first = 0; first < weights.size(); first += 4) {
    float sorted[4];
    for (std::size_t i = 0; i < 4; ++i) sorted[i] = std::abs(weights[first + i]);
    std::sort(sorted, sorted + 4);
    for (std::size_t i = 0; i < 4; ++i) {
      const bool stays = std::abs(weights[first + i]) >= sorted[2];
      EXPECT_EQ(is_pruned(got[first + i]), !stays);
      EXPECT_EQ(got[first + i], stays ? weights[first + i] : 0);
    }
  }
}

TEST(Pruned, of_equal_ones_the_last_go_and_what_is_pruned_stays_so) {
  expect_pruned({1, -1, 1, -1}, {1, -1, -0.f, -0.f});
  expect_pruned({0, 0, 0, 0}, {0, 0, -0.f, -0.f});
  expect_pruned({-0.f, -0.f, 0, 0}, {-0.f, -0.f, 0, 0});
  expect_pruned({-0.f, 0, -0.f, 0}, {-0.f, 0, -0.f, 0});
  expect_pruned({-0.f, -0.f, -0.f, 7}, {0, -0.f, -0.f, 7});
  constexpr float tiny = std::numeric_limits<float>::denorm_min();
  expect_pruned({-tiny, 1, 0, 0}, {0, 1, -0.f, -0.f});  // it would round to −0
}

TEST(Pruned, takes_fours_only) {
  std::vector<float> five(5);
  testing::expect_error(ErrorKind::usage, "5 weights are no fours", [&] { prune_two_of_four(five); });
}

TEST(Pruned, small_weights_that_round_to_minus_zero_do_not_become_pruned) {
  const std::vector<float> weights = {-1e-9f, -0.0f, 1e-9f, -2.0f};
  std::vector<std::uint16_t> halves;
  for (const float weight : weights) halves.push_back(f16(weight).bits);
  ASSERT_EQ(halves[0], 0x8000);
  tensor::keep_unpruned(weights, halves);
  EXPECT_EQ(halves, (std::vector<std::uint16_t>{0, 0x8000, 0, f16(-2.0f).bits}));
}

TEST(ZeroPruned, zeroes_where_the_weight_is_minus_zero) {
  for (const DType of : floating_dtypes)
    for (const DType to : floating_dtypes)
      for (const std::int64_t n : {0, 1, 77, 40003}) {
        if (n > 100 && of != DType::bf16) continue;
        SCOPED_TRACE(cat(n, " ", name_of(to), " by weights in ", name_of(of)));
        std::vector<double> weights = normals_in(of, n, 1);
        const std::vector<double> before = normals_in(to, n, 2);
        for (std::size_t i = 0; i < weights.size(); ++i)
          if (i % 3 < 2) weights[i] = i % 3 == 0 ? -0.0 : 0.0;
        on_every_machine(
            [&](Machine& m) {
              const Tensor x = m.of({n}, to, before);
              m.kernels.zero_pruned(m.of({n}, of, weights), x);
              return std::vector<Tensor>{x};
            },
            [&](const std::vector<Tensor>& got) {
              const std::vector<double> values = values_of(got[0]);
              for (std::size_t i = 0; i < values.size(); ++i)
                ASSERT_EQ(values[i], i % 3 == 0 ? 0 : before[i]) << i;
            },
            Alike::to_the_bit);
        if (HasFatalFailure()) return;
      }
  Machine m(CpuIsa::portable, 1);
  testing::expect_error(ErrorKind::usage, "have different sizes",
                        [&] { m.kernels.zero_pruned(m.empty({4}, DType::f32), m.empty({5}, DType::f32)); });
}

}  // namespace
}  // namespace sherd::test
