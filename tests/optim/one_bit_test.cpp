// Momentum that travels as one bit per element, against plain loops over scalars, and the same bits from
// every instruction set, however spans are cut.
#include "optim/one_bit.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "optim/span_fixture.h"
#include "simt/emulated.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t word = 64;

/// The bits and scales that one replica packs.
struct Packed {
  explicit Packed(std::int64_t n, std::uint64_t seed = 5, DType dtype = DType::f32)
      : grad(static_cast<std::size_t>(n), dtype),
        momentum(static_cast<std::size_t>(n)),
        error(momentum.size()),
        signs(static_cast<std::size_t>((n + word - 1) / word), ~0ull) {
    for (std::size_t i = 0; i < momentum.size(); ++i) {
      grad.set(i, normal_at({seed, 1}, i));
      momentum[i] = normal_at({seed, 2}, i), error[i] = i % 97 == 0 ? 0 : normal_at({seed, 3}, i);
    }
  }
  MomentumSpan span(std::int64_t begin, std::int64_t n) {
    MomentumSpan out;
    out.grad = grad.at(begin), out.grad_dtype = grad.dtype, out.grad_factor = 0.3, out.beta1 = 0.8;
    out.momentum = momentum.data() + begin, out.error = error.data() + begin;
    out.signs = signs.data() + begin / word, out.n = n;
    return out;
  }

  Stored grad;
  std::vector<float> momentum, error;
  std::vector<std::uint64_t> signs;
};

bool negative(const std::vector<std::uint64_t>& signs, std::int64_t i) {
  return signs[static_cast<std::size_t>(i / word)] >> (i % word) & 1;
}

TEST(OneBit, PacksMomentumAndErrorAsAPlainLoop) {
  Arena arena(2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t n : {1, 63, 64, 1000, 70000}) {
      const Packed before(n, 5, dtype);
      for (const CpuIsa isa : every_isa()) {
        Packed packed(n, 5, dtype);
        tensor::ExactSum squares;
        compress_momentum(packed.span(0, n), arena, squares, isa);
        double sum = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto k = static_cast<std::size_t>(i);
          const float x = 0.8f * before.momentum[k] +
                          static_cast<float>(1 - 0.8) * (before.grad.get(k) * 0.3f) + before.error[k];
          ASSERT_EQ(packed.error[k], x) << i;
          ASSERT_EQ(negative(packed.signs, i), x < 0) << i;
          sum += static_cast<double>(x) * x;
        }
        for (std::int64_t i = n; i < std::ssize(packed.signs) * word; ++i)
          ASSERT_FALSE(negative(packed.signs, i)) << "what fills up the last word";
        EXPECT_NEAR(squares.value(), sum, 1e-12 * sum);
        EXPECT_EQ(one_bit_scale(squares, n),
                  static_cast<float>(std::sqrt(squares.value() / static_cast<double>(n))));
        EXPECT_EQ(packed.momentum, before.momentum);
      }
    }
}

TEST(OneBit, CutsAndThreadsDoNotShow) {
  constexpr std::int64_t n = 70000;
  Packed whole(n), parts(n);
  tensor::ExactSum of_whole, of_parts;
  Arena one(1), two(2);
  compress_momentum(whole.span(0, n), one, of_whole);
  for (std::int64_t at = 0; at < n; at += 640)
    compress_momentum(parts.span(at, std::min<std::int64_t>(640, n - at)), two, of_parts);
  EXPECT_EQ(whole.error, parts.error);
  EXPECT_EQ(whole.signs, parts.signs);
  EXPECT_EQ(of_whole.value(), of_parts.value());
}

TEST(OneBit, AddsUpWhatReplicasSendInTheirOrder) {
  Arena arena(2);
  for (const std::int64_t n : {1, 64, 100, 70001}) {
    std::vector<Packed> replicas;
    for (std::uint64_t r = 0; r < 3; ++r) {
      replicas.emplace_back(n, 20 + r);
      tensor::ExactSum unused;
      compress_momentum(replicas.back().span(0, n), arena, unused);
    }
    const std::vector<float> scales = {0.7f, 1.1f, 0.3f}, before = Packed(n, 77).error;
    std::vector<std::uint64_t> blocks;  // of signs, with the scale behind them
    for (std::size_t r = 0; r < 3; ++r) {
      blocks.insert(blocks.end(), replicas[r].signs.begin(), replicas[r].signs.end());
      blocks.push_back(std::bit_cast<std::uint32_t>(scales[r]));
    }
    const std::size_t words = replicas[0].signs.size();
    const SentMomentum sent{blocks.data(), reinterpret_cast<const float*>(blocks.data() + words),
                            static_cast<std::int64_t>((words + 1) * sizeof(std::uint64_t)), 3};
    for (const CpuIsa isa : every_isa()) {
      std::vector<float> error = before;
      std::vector<std::uint64_t> result(replicas[0].signs.size(), ~0ull);
      tensor::ExactSum squares;
      average_momentum(sent, error.data(), result.data(), n, arena, squares, isa);
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto k = static_cast<std::size_t>(i);
        float y = 0;
        for (std::size_t r = 0; r < 3; ++r) y += negative(replicas[r].signs, i) ? -scales[r] : scales[r];
        y = y * (1.0f / 3) + before[k];
        ASSERT_EQ(error[k], y) << i;
        ASSERT_EQ(negative(result, i), y < 0) << i;
        sum += static_cast<double>(y) * y;
      }
      EXPECT_NEAR(squares.value(), sum, 1e-12 * sum);
    }
  }
}

TEST(OneBit, WhatHasTravelledIsNoError) {
  Arena arena(1);
  std::vector<float> error = {3, -3, 0.5f, 0, -0.0f};
  settle_error(error.data(), 2, std::ssize(error), arena);
  EXPECT_EQ(error, (std::vector<float>{1, -1, -1.5f, -2, -2}));
}

/// Kernels against the processor's loops; a whole run on a GPU is tests/engine/gpu/.
TEST(OneBit, AGpuHasTheBitsOfTheProcessor) {
  Arena arena(1);
  const auto device = device::make_cpu_device(1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t n : {1, 33, 64, 700, 5001}) {
      Packed here(n, 5, dtype), there(n, 5, dtype);
      tensor::ExactSum squares;
      compress_momentum(here.span(0, n), arena, squares);
      test::emulated_compress(there.span(0, n), *device);
      EXPECT_EQ(there.error, here.error);
      EXPECT_EQ(there.signs, here.signs);
      const auto words = std::ssize(here.signs);
      std::vector<std::uint64_t> blocks(static_cast<std::size_t>(2 * words + 2), 0x123456789abcdefull);
      std::copy(here.signs.begin(), here.signs.end(), blocks.begin());
      if (n % word > 0) blocks[static_cast<std::size_t>(2 * words)] &= ~(~0ull << (n % word));
      const float scales[2] = {0.5f, 0.75f};
      for (const int r : {0, 1})
        std::memcpy(&blocks[static_cast<std::size_t>((r + 1) * (words + 1) - 1)], &scales[r], sizeof(float));
      const SentMomentum sent{blocks.data(), reinterpret_cast<const float*>(blocks.data() + words),
                              (words + 1) * 8, 2};
      average_momentum(sent, here.error.data(), here.signs.data(), n, arena, squares);
      test::emulated_average(sent, there.error.data(), there.signs.data(), n, *device);
      EXPECT_EQ(there.error, here.error);
      EXPECT_EQ(there.signs, here.signs);
      settle_error(here.error.data(), 0.25f, n, arena);
      test::emulated_settle(there.error.data(), 0.25f, n, *device);
      EXPECT_EQ(there.error, here.error);
    }
}

TEST(OneBit, AGpuTakesWhatReplicasAgreedOn) {
  const auto device = device::make_cpu_device(1);
  for (const std::int64_t n : {1, 33, 64, 700}) {
    Packed packed(n);
    std::vector<float> error = packed.error, momentum = packed.momentum, variance(momentum.size(), 1);
    for (std::size_t i = 0; i < variance.size(); i += 5) variance[i] = 0;
    for (std::uint64_t& signs : packed.signs) signs = 0x123456789abcdefull;
    test::emulated_take({packed.signs.data(), 0.25f, error.data(), 0.5f}, variance.data(), momentum.data(), n,
                        *device);
    for (std::size_t i = 0; i < variance.size(); ++i) {
      const float e = packed.error[i],
                  sent = negative(packed.signs, static_cast<std::int64_t>(i)) ? -0.25f : 0.25f;
      EXPECT_EQ(momentum[i], i % 5 == 0 ? 0 : sent) << i;
      EXPECT_EQ(error[i], i % 5 == 0 ? 0 : e - (e < 0 ? -0.5f : 0.5f)) << i;
    }
  }
}

Hyper one_bit_adam() {
  Hyper hyper = config::default_rule(config::OptimizerType::onebitadam);
  hyper.lr = 0.01, hyper.weight_decay = 0.1;
  hyper.as<config::OneBitAdamOptions>().freeze_step = 3, hyper.as<config::OneBitAdamOptions>().eps = 1e-6;
  return hyper;
}

TEST(OneBit, UpdatesByTheMomentumThatReplicasAgreedOn) {
  Arena arena(2);
  constexpr std::size_t n = 40041;
  const Hyper hyper = one_bit_adam();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const bool split : {false, true}) {
      if (split && dtype != DType::bf16) continue;
      Span start = random_span(n, DType::f32, dtype);
      for (std::size_t i = 0; i < n; i += 13) start.second.set(i, 0);
      if (split) start = start.as_split(arena);
      const Packed packed(n);
      const std::vector<float> weights = split ? start.joined(arena).master : start.master;
      for (const CpuIsa isa : every_isa()) {
        Span span = start;
        std::vector<float> error = packed.error;
        SpanUpdate update = span.all();
        update.grad = nullptr;
        std::vector<std::uint64_t> signs = packed.signs;
        for (std::size_t i = 0; i < signs.size(); ++i) signs[i] = 0x123456789abcdefull * (i + 1);
        ASSERT_TRUE(update_agreed(update, {signs.data(), 0.25f, error.data(), 0.5f}, hyper, 4, arena, isa));
        const Span after = split ? span.joined(arena) : span;
        for (std::size_t i = 0; i < n; ++i) {
          const float v = start.second.get(i);
          const float m = v == 0 ? 0 : negative(signs, static_cast<std::int64_t>(i)) ? -0.25f : 0.25f;
          const float e = packed.error[i];
          ASSERT_EQ(error[i], v == 0 ? 0 : e - (e < 0 ? -0.5f : 0.5f)) << i;
          ASSERT_EQ(after.first.get(i), m) << i;
          ASSERT_EQ(after.second.get(i), v) << i;
          const float p = weights[i] - 0.01f * (m / (std::sqrt(v) + 1e-6f) + 0.1f * weights[i]);
          ASSERT_EQ(after.master[i], p) << i;
        }
      }
    }
}

/// Up to freeze_step as Adam without bias correction; one replica goes on with a variance that stays.
TEST(OneBit, OneReplicaWarmsUpAndFreezes) {
  Arena arena(1);
  const Hyper hyper = one_bit_adam();
  Span span = random_span(1000, DType::f32, DType::f32);
  for (std::int64_t step = 1; step <= 6; ++step) {
    const Span before = span;
    ASSERT_TRUE(update(span.all(), hyper, step, arena));
    for (std::size_t i = 0; i < 1000; ++i) {
      const float g = before.grad.get(i), p = before.master[i];
      const float m = 0.9f * before.first.get(i) + static_cast<float>(1 - 0.9) * g;
      const float v = step <= 3 ? 0.999f * before.second.get(i) + static_cast<float>(1 - 0.999) * (g * g)
                                : before.second.get(i);
      ASSERT_EQ(span.first.get(i), m);
      ASSERT_EQ(span.second.get(i), v);
      ASSERT_EQ(span.master[i], p - 0.01f * (m / (std::sqrt(v) + 1e-6f) + 0.1f * p));
    }
  }
}

}  // namespace
}  // namespace sherd::optim
