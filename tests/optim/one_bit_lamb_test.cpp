// 1-bit LAMB behind its freeze_step, against plain loops over scalars, and the same bits from every
// instruction set, however spans are cut. Whole runs are judged by
// tests/engine/oracle/one_bit_oracle_test.cpp.
#include "optim/one_bit_lamb.h"

#include <gtest/gtest.h>

#include <cmath>

#include "optim/span_fixture.h"
#include "simt/emulated.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t signs_of_word = 64;

Hyper one_bit_lamb(double eps = 1e-6) {
  Hyper hyper = config::default_rule(config::OptimizerType::onebitlamb);
  hyper.lr = 0.01, hyper.weight_decay = 0.1;
  hyper.as<config::OneBitLambOptions>().freeze_step = 3, hyper.as<config::OneBitLambOptions>().eps = eps;
  return hyper;
}

/// All memory of a pass, with signs and errors beside the span. The variance of every 13th element is 0, but
/// where there is no eps.
struct Pass {
  Pass(std::size_t n, DType grads, bool split, Arena& arena, float small = 1e-6f)
      : span(random_span(n, grads, DType::bf16)), fresh(n), error(n), signs((n + 63) / 64), eps(small) {
    for (std::size_t i = 0; i < n; ++i) {
      const bool varies = i % 13 != 5 || eps == 0;
      if (!varies) span.second.set(i, 0), span.first.set(i, 0);
      fresh[i] = varies ? std::abs(normal_at({7, 1}, i)) * 1e-4f : 0;
      error[i] = normal_at({7, 2}, i);
    }
    for (std::size_t i = 0; i < signs.size(); ++i) signs[i] = 0x123456789abcdefull * (i + 1);
    weights = span.master;
    if (split) span = span.as_split(arena), weights = span.joined(arena).master;
  }
  /// Elements from `begin` on, up to `end`.
  void run(CpuIsa isa, bool agreed, bool first, std::int64_t begin, std::int64_t end, Arena& arena,
           NormSums& sums) {
    SpanUpdate update = span.update(begin, end);
    update.grad_factor = 0.5;
    const AgreedMomentum momentum{signs.data() + begin / signs_of_word, 0.25f, error.data() + begin, 0.5f};
    refresh_variance(update, agreed ? &momentum : nullptr, fresh.data() + begin, first, one_bit_lamb(eps),
                     arena, sums, isa);
  }

  Span span;
  std::vector<float> weights, fresh, error;
  std::vector<std::uint64_t> signs;
  float eps;
};

void expect_formulas(std::size_t n, DType grads, bool split, bool agreed, bool first, float eps = 1e-6f) {
  Arena arena(2);
  const Pass before(n, grads, split, arena, eps);
  for (const CpuIsa isa : every_isa()) {
    Pass pass = before;
    NormSums sums;
    pass.run(isa, agreed, first, 0, static_cast<std::int64_t>(n), arena, sums);
    double directions = 0, updates = 0;
    float ratio = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const float old = before.span.first.get(i), v = before.span.second.get(i);
      float m = 0.9f * old + static_cast<float>(1 - 0.9) * (before.span.grad.get(i) * 0.5f);
      if (agreed) m = before.signs[i / 64] >> (i % 64) & 1 ? -0.25f : 0.25f;
      if (v == 0) m = 0;
      ASSERT_EQ(pass.span.first.get(i), m) << i;
      const float e = before.error[i];
      ASSERT_EQ(pass.error[i], !agreed ? e : v == 0 ? 0 : e - (e < 0 ? -0.5f : 0.5f)) << i;
      const float g = (m - 0.9f * old) * static_cast<float>(1 / (1 - 0.9));
      const float fresh = 0.999f * (first ? v : before.fresh[i]) + static_cast<float>(1 - 0.999) * (g * g);
      ASSERT_EQ(pass.fresh[i], fresh) << i;
      const float denominator = std::sqrt(v) + eps, direction = m / denominator;
      directions += static_cast<double>(direction) * direction;
      const float update = direction + 0.1f * before.weights[i];
      updates += static_cast<double>(update) * update;
      ratio = std::max(ratio, denominator / (std::sqrt(fresh) + eps));
    }
    EXPECT_NEAR(sums.weight.value() / directions, 1, 1e-12);
    EXPECT_NEAR(sums.measured.value() / updates, 1, 1e-12);
    EXPECT_EQ(sums.ratio, ratio);
    pass.span.first = before.span.first;
    EXPECT_TRUE(pass.span == before.span) << "weights and variance stay";
  }
}

TEST(OneBitLamb, RefreshesTheVarianceAndMeasuresAsAPlainLoop) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{40001}})
    for (const DType grads : {DType::f32, DType::bf16, DType::f16})
      for (const bool split : {false, true})
        for (const bool agreed : {false, true})
          for (const bool first : {false, true}) expect_formulas(n, grads, split, agreed, first);
}

/// The elements that fill up the last block give no 0/0.
TEST(OneBitLamb, MeasuresPartsOfABlockWithoutAnEps) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{40001}})
    for (const bool agreed : {false, true})
      for (const bool first : {false, true}) expect_formulas(n, DType::f32, true, agreed, first, 0);
}

TEST(OneBitLamb, CutsAndThreadsDoNotShow) {
  constexpr std::int64_t n = 70000;
  Arena one(1), two(2);
  for (const bool agreed : {false, true}) {
    Pass whole(n, DType::bf16, true, one), parts(n, DType::bf16, true, one);
    NormSums of_whole, of_parts;
    whole.run(cpu_isa(), agreed, false, 0, n, one, of_whole);
    for (std::int64_t at = 0; at < n; at += 640)
      parts.run(cpu_isa(), agreed, false, at, std::min(n, at + 640), two, of_parts);
    EXPECT_TRUE(parts.span == whole.span);
    EXPECT_TRUE(parts.fresh == whole.fresh && parts.error == whole.error);
    EXPECT_EQ(of_parts.weight.to_words(), of_whole.weight.to_words());
    EXPECT_EQ(of_parts.measured.to_words(), of_whole.measured.to_words());
    EXPECT_EQ(of_parts.ratio, of_whole.ratio);
  }
}

/// The kernel against the processor's loop; sums are Kernels::sum_of_squares().
TEST(OneBitLamb, AGpuHasTheBitsOfTheProcessor) {
  Arena arena(1);
  const auto device = device::make_cpu_device(1);
  for (const std::int64_t n : {1, 33, 64, 5001})
    for (const DType grads : {DType::f32, DType::bf16, DType::f16})
      for (const bool agreed : {false, true})
        for (const bool first : {false, true}) {
          Pass here(static_cast<std::size_t>(n), grads, false, arena), there = here;
          NormSums sums;
          here.run(cpu_isa(), agreed, first, 0, n, arena, sums);
          SpanUpdate span = there.span.all();
          span.grad_factor = 0.5;
          const AgreedMomentum momentum{there.signs.data(), 0.25f, there.error.data(), 0.5f};
          std::vector<float> directions(static_cast<std::size_t>(n)), updates = directions;
          float ratio = 0;
          test::emulated_refresh(FrozenLamb::make(one_bit_lamb(), true), span, agreed ? &momentum : nullptr,
                                 there.weights.data(), there.fresh.data(), first,
                                 {directions.data(), updates.data(), &ratio}, *device);
          EXPECT_TRUE(there.span == here.span);
          EXPECT_TRUE(there.fresh == here.fresh && there.error == here.error);
          EXPECT_EQ(ratio, sums.ratio);
          const auto kernels = tensor::make_kernels(*device);
          NormSums of_kernel;
          kernels->sum_of_squares(tensor::Tensor::of<float>(*device, {n}, std::span<const float>(directions)),
                                  of_kernel.weight);
          kernels->sum_of_squares(tensor::Tensor::of<float>(*device, {n}, std::span<const float>(updates)),
                                  of_kernel.measured);
          EXPECT_EQ(of_kernel.weight.to_words(), sums.weight.to_words());
          EXPECT_EQ(of_kernel.measured.to_words(), sums.measured.to_words());
        }
}

/// A parameter whose ratios are all below 1: what fills up its last block has none.
TEST(OneBitLamb, TheLargestRatioIsAnElements) {
  Arena arena(1);
  Pass pass(70, DType::f32, false, arena);
  for (std::size_t i = 0; i < 70; ++i) pass.span.second.set(i, 1e-4f), pass.fresh[i] = 1;
  NormSums sums;
  pass.run(cpu_isa(), true, false, 0, 70, arena, sums);
  EXPECT_GT(sums.ratio, 0);
  EXPECT_LT(sums.ratio, 0.011);
}

TEST(OneBitLamb, LearnsTrustRatiosUpToTheFreezeStep) {
  Hyper hyper = one_bit_lamb();
  hyper.as<config::OneBitLambOptions>().coeff_beta = 0.75;
  TrustMemory memory;
  remember(hyper, 1, memory);  // of norms of 0
  EXPECT_EQ(memory, (TrustMemory{0, 1}));
  remember(hyper, 4, memory);
  remember(hyper, 2, memory);
  EXPECT_EQ(memory, (TrustMemory{1.25, 1}));  // 0.75·1 + 0.25·2
}

TEST(OneBitLamb, FollowsVariancesWithinItsBounds) {
  Hyper hyper = one_bit_lamb();
  auto& own = hyper.as<config::OneBitLambOptions>();
  own.factor_min = 0.5, own.factor_max = 2, own.factor_threshold = 0.25;
  TrustMemory memory{3, 1};
  EXPECT_EQ(frozen_trust(hyper, 1, 2, 1.25, memory), 3 * 1.125);  // half of the step is direction
  EXPECT_EQ(memory.factor, 1.125);
  EXPECT_EQ(frozen_trust(hyper, 1, 1, 1.25, memory), 3 * 1.25);
  EXPECT_EQ(frozen_trust(hyper, 2, 1, 1.25, memory), 3 * 1.25) << "decay made the step smaller";
  EXPECT_EQ(frozen_trust(hyper, 1, 1, 9, memory), 3 * 1.5625) << "a quarter more at most";
  EXPECT_EQ(frozen_trust(hyper, 1, 1, 9, memory), 3 * 1.953125);
  EXPECT_EQ(frozen_trust(hyper, 1, 1, 9, memory), 3 * 2.0) << "factor_max";
  for (int i = 0; i < 5; ++i) frozen_trust(hyper, 1, 1, 0.01, memory);
  EXPECT_EQ(memory.factor, 0.5) << "factor_min";
  EXPECT_EQ(frozen_trust(hyper, 0, 0, 1, memory), 3 * 0.625) << "nothing moves";
  memory = {};
  EXPECT_EQ(frozen_trust(hyper, 1, 1, 1, memory), 1) << "nothing was learned";
}

/// Resumed with a later freeze_step, a run that was frozen warms up again.
TEST(OneBitLamb, FreezesAnewAfterAnotherWarmUp) {
  Hyper hyper = one_bit_lamb();
  hyper.as<config::OneBitLambOptions>().coeff_beta = 0.75;
  TrustMemory memory{3, 1};
  frozen_trust(hyper, 1, 1, 0.9, memory);
  EXPECT_EQ(memory, (TrustMemory{3, 0.9, true}));
  TrustMemory other = memory;
  remember(hyper, 1, memory);
  EXPECT_EQ(memory, (TrustMemory{3, 1, false}));
  remember(hyper, 7, other);
  EXPECT_EQ(other, (TrustMemory{4, 1, false}));
}

TEST(OneBitLamb, RefusesOtherRulesAndStates) {
  Arena arena(1);
  Span span = random_span(8, DType::f32, DType::f32),
       rounded = random_span(8, DType::f32, DType::f32, DType::bf16);
  float fresh[8] = {};
  NormSums sums;
  const Hyper lamb = config::default_rule(config::OptimizerType::lamb);
  EXPECT_THROW(refresh_variance(span.all(), nullptr, fresh, false, lamb, arena, sums), Error);
  EXPECT_THROW(refresh_variance(rounded.all(), nullptr, fresh, false, one_bit_lamb(), arena, sums), Error);
  EXPECT_THROW(refresh_variance(span.all(), nullptr, nullptr, false, one_bit_lamb(), arena, sums), Error);
}

}  // namespace
}  // namespace sherd::optim
