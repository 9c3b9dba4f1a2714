#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "optim/span_fixture.h"
#include "support/expect_error.h"

namespace sherd::optim {
namespace {

// The rule's definition of the 16 rounding bits of one element (optim/update_rule.h), from the scalar
// generator.
std::uint32_t rounding_bits(RandomKey parameter, std::int64_t step, std::uint64_t moment,
                            std::uint64_t element) {
  const RandomKey key = parameter.at(0x6d6f6d656e74ull).at(static_cast<std::uint64_t>(step));
  const auto x = [&](std::uint64_t section, std::uint64_t i) {
    return philox(key, 16 * section + i % 32 / 2)[2 * moment + i / 32] >> (i % 2 * 16) & 0xffffu;
  };
  const std::uint64_t tile = element / 4096;
  return (x(2 * tile, element % 64) + x(2 * tile + 1, element / 64 % 64)) & 0xffffu;
}

float rounded(float value, std::uint32_t bits) {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) + bits) & 0xffff0000u);
}

TEST(Bf16Moments, FollowTheirDefinition) {
  Arena arena(1);
  Hyper h;
  h.weight_decay = 0.1;
  const std::size_t n = 9333;
  const std::int64_t first = 1'000'003;  // somewhere within a tile, and over two more
  Span narrow = random_span(n, DType::f32, DType::f32, DType::bf16);
  Span wide(n, DType::f32, DType::f32);
  wide.master = narrow.master, wide.grad = narrow.grad;
  for (int step = 1; step <= 3; ++step) {
    for (std::size_t i = 0; i < n; ++i)
      wide.first.set(i, narrow.first.get(i)), wide.second.set(i, narrow.second.get(i));
    SpanUpdate u = narrow.all();
    u.first_element = first;
    ASSERT_TRUE(update(u, h, step, arena));
    ASSERT_TRUE(update(wide.all(), h, step, arena));
    EXPECT_EQ(narrow.master, wide.master);  // the weight moves by the moments before they are rounded
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t element = static_cast<std::uint64_t>(first) + i;
      ASSERT_EQ(narrow.first.get(i), rounded(wide.first.get(i), rounding_bits(u.rounding, step, 0, element)))
          << i;
      ASSERT_EQ(narrow.second.get(i),
                rounded(wide.second.get(i), rounding_bits(u.rounding, step, 1, element)))
          << i;
    }
  }
}

TEST(Bf16Moments, InstructionSetsAgreeToTheBit) {
  Arena arena(1);
  for (const Hyper& h : every_rule())
    for (const DType grads : {DType::f32, DType::bf16, DType::f16})
      for (const DType params : {DType::f32, DType::bf16, DType::f16}) {
        const Span start = random_span(1037, grads, params, DType::bf16);
        Span want = start;
        for (int step = 1; step <= 3; ++step)
          ASSERT_TRUE(update(want.all(), h, step, arena, CpuIsa::portable));
        for (const CpuIsa isa : every_isa()) {
          Span got = start;
          for (int step = 1; step <= 3; ++step) ASSERT_TRUE(update(got.all(), h, step, arena, isa));
          EXPECT_TRUE(got == want) << name_of(isa) << ", gradients " << name_of(grads) << ", parameters "
                                   << name_of(params);
        }
      }
}

TEST(Bf16Moments, InstructionSetsAgreeWhereverASpanBeginsAndIsCut) {
  Arena arena(1);
  const std::int64_t n = 9001;
  for (const Hyper& h : every_rule()) {
    const Span start = random_span(n, DType::bf16, DType::bf16, DType::bf16).as_split(arena);
    for (const std::int64_t first : {0, 1, 63, 65, 4095, 1'000'003}) {
      const auto update_range = [&](Span& span, CpuIsa isa, std::int64_t begin, std::int64_t end) {
        SpanUpdate u = span.update(begin, end);
        u.first_element += first;
        ASSERT_TRUE(update(u, h, 3, arena, isa));
      };
      Span want = start;
      update_range(want, CpuIsa::portable, 0, n);
      for (const CpuIsa isa : every_isa())
        for (const std::int64_t cut : {1, 31, 64, 4097}) {
          Span got = start;
          update_range(got, isa, 0, cut);
          update_range(got, isa, cut, n);
          EXPECT_TRUE(got == want) << name_of(isa) << ", elements from " << first << ", cut at " << cut;
        }
    }
  }
}

TEST(Bf16Moments, CutsAndThreadsDoNotShow) {
  Arena one(1), four(4);
  const std::int64_t n = 200'003;
  for (const Hyper& h : every_rule()) {
    const Span start =
        random_span(static_cast<std::size_t>(n), DType::bf16, DType::bf16, DType::bf16).as_split(one);
    Span whole = start, threaded = start, cut = start;
    ASSERT_TRUE(update(whole.all(), h, 7, one));
    ASSERT_TRUE(update(threaded.all(), h, 7, four));
    std::int64_t begin = 0;
    for (std::int64_t size = 1; begin < n; size = size * 3 + 1) {
      const std::int64_t end = std::min(begin + size, n);
      ASSERT_TRUE(update(cut.update(begin, end), h, 7, one));
      begin = end;
    }
    EXPECT_TRUE(threaded == whole);
    EXPECT_TRUE(cut == whole);
  }
}

TEST(Bf16Moments, EveryCoordinateOfTheKeyCounts) {
  Arena arena(1);
  const Hyper h;
  const auto moments = [&](auto change, std::int64_t step = 5) {
    Span span = random_span(256, DType::f32, DType::f32, DType::bf16);
    SpanUpdate u = span.all();
    change(u);
    Hyper uncorrected = h;
    uncorrected.as<config::AdamOptions>().bias_correction = false;  // or the step would show otherwise
    EXPECT_TRUE(update(u, uncorrected, step, arena));
    return std::array{span.first, span.second};
  };
  const auto same = [](SpanUpdate&) {};
  const auto base = moments(same);
  EXPECT_EQ(moments(same), base);
  for (const auto& other :
       {moments([](SpanUpdate& u) { u.rounding.seed = 18; }),
        moments([](SpanUpdate& u) { u.rounding.stream = stable_hash("block.1.weight"); }),
        moments([](SpanUpdate& u) { u.first_element = 64; }),
        moments([](SpanUpdate& u) { u.first_element = 1; }),
        moments([](SpanUpdate& u) { u.first_element = std::int64_t{1} << 38; }), moments(same, 6)}) {
    EXPECT_FALSE(other[0] == base[0]);
    EXPECT_FALSE(other[1] == base[1]);
  }
}

// One step from zero moments: every element rounds the same value, so the mean must come out and the chance
// of rounding up must be the part that is cut off.
TEST(Bf16Moments, RoundingIsUnbiased) {
  Arena arena(2);
  const std::size_t n = 1 << 18;
  for (const float part : {0.0f, 1.0f / 1024, 0.1f, 0.5f, 0.875f}) {
    const float g = 1.0f + part * 0x1p-7f;  // `part` of the way from one bf16 to the next
    for (const float sign : {1.0f, -1.0f}) {
      Hyper h;
      auto& adam = h.as<config::AdamOptions>();
      adam.beta1 = 0, adam.beta2 = 0, adam.bias_correction = false;
      Span span(n, DType::f32, DType::f32, DType::bf16);
      for (std::size_t i = 0; i < n; ++i) span.set_grad(i, sign * g);
      ASSERT_TRUE(update(span.all(), h, 1, arena));
      double up = 0, up_second = 0, both = 0;
      const float v = g * g, v_below = rounded(v, 0);
      const double v_part = static_cast<double>(v - v_below) / (rounded(v, 0xffff) == v_below ? 1 : 0x1p-7);
      for (std::size_t i = 0; i < n; ++i) {
        const float m = span.first.get(i) * sign;
        ASSERT_TRUE(m == 1.0f || m == 1.0f + 0x1p-7f) << m;
        const double m_up = m != 1.0f, s_up = span.second.get(i) != v_below;
        up += m_up, up_second += s_up, both += m_up * s_up;
      }
      const double count = static_cast<double>(n);
      const auto deviation = [&](double p) { return 4.5 * std::sqrt(p * (1 - p) * count) + 1e-9; };
      EXPECT_NEAR(up, part * count, deviation(part));
      EXPECT_NEAR(up_second, v_part * count, deviation(v_part));
      const double p_both = part * v_part;  // the two moments round independently
      EXPECT_NEAR(both, p_both * count, deviation(p_both));
    }
  }
}

// β2 = 0.999 moves v by a thousandth a step, less than half a bf16 step: to nearest, v would never move.
TEST(Bf16Moments, SlowMeansAreNotStuck) {
  Arena arena(1);
  Hyper h;
  h.lr = 0;
  const std::size_t n = 4096;
  Span span(n, DType::f32, DType::f32, DType::bf16);
  for (std::size_t i = 0; i < n; ++i) span.second.set(i, 1.0f), span.set_grad(i, 0.5f);
  for (int step = 1; step <= 2000; ++step) ASSERT_TRUE(update(span.all(), h, step, arena));
  const double want = 0.25 + 0.75 * std::pow(0.999, 2000);
  double mean = 0;
  for (std::size_t i = 0; i < n; ++i) mean += span.second.get(i) / static_cast<double>(n);
  EXPECT_NEAR(mean, want, 0.002 * want);
}

TEST(Bf16Moments, SecondMomentsStayNonNegative) {
  Arena arena(1);
  Span span(4096, DType::f32, DType::f32, DType::bf16);
  const Hyper h;
  for (int step = 1; step <= 50; ++step) {
    for (std::size_t i = 0; i < 4096; ++i)  // from far below the normal range to large
      span.set_grad(
          i, std::ldexp(normal_at({4, static_cast<std::uint64_t>(step)}, i), static_cast<int>(i % 120) - 90));
    ASSERT_TRUE(update(span.all(), h, step, arena));
  }
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_FALSE(std::signbit(span.second.get(i))) << i;
}

TEST(Bf16Moments, OverflowIsReported) {
  Arena arena(1);
  Hyper momentum = config::default_rule(config::OptimizerType::sgd);
  momentum.lr = 1e-30, momentum.as<config::SgdOptions>().momentum = 0.5;
  const auto finite = [&](std::uint32_t gradient, const Hyper& h) {
    bool out = true;
    for (const std::size_t at : {std::size_t{0}, std::size_t{64}, std::size_t{99}}) {
      Span span(100, DType::f32, DType::f32, DType::bf16);
      span.set_grad(at, std::bit_cast<float>(gradient));
      out = update(span.all(), h, 1, arena) && out;
      for (std::size_t i = 0; i < 100; ++i) EXPECT_TRUE(!out || std::isfinite(span.first.get(i)));
    }
    return out;
  };
  EXPECT_TRUE(finite(0x7f7f0000u, momentum));   // the largest bf16
  EXPECT_FALSE(finite(0x7f7f0001u, momentum));  // finite, but rounding may end at infinity
  EXPECT_FALSE(finite(0xff7fffffu, momentum));
  for (const std::uint32_t special : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_FALSE(finite(special, momentum)) << std::hex << special;
    EXPECT_FALSE(finite(special, Hyper())) << std::hex << special;
  }
}

// Least squares with noisy gradients: bf16 moments must train as well as fp32 ones.
double regression_loss(DType moments, bool split) {
  Arena arena(1);
  const std::size_t features = 48, samples = 256;
  Hyper h;
  h.lr = 0.01;
  std::vector<float> x(samples * features), target(samples), truth(features);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = normal_at({6, 1}, i);
  for (std::size_t i = 0; i < features; ++i) truth[i] = normal_at({6, 2}, i);
  for (std::size_t s = 0; s < samples; ++s) {
    target[s] = 0.1f * normal_at({6, 3}, s);
    for (std::size_t i = 0; i < features; ++i) target[s] += x[s * features + i] * truth[i];
  }
  Span span(features, DType::f32, DType::bf16, moments);
  if (split) span = span.as_split(arena);
  const auto error = [&](const Span& at, std::size_t s) {
    float out = -target[s];
    for (std::size_t i = 0; i < features; ++i) out += x[s * features + i] * at.master[i];
    return out;
  };
  for (int step = 1; step <= 4000; ++step) {
    const Span weights = split ? span.joined(arena) : span;
    std::vector<float> gradient(features);
    for (std::size_t k = 0; k < 8; ++k) {
      const std::size_t s = philox({6, 5}, static_cast<std::uint64_t>(step) * 8 + k)[0] % samples;
      const float e = error(weights, s);
      for (std::size_t i = 0; i < features; ++i) gradient[i] += e * x[s * features + i] / 8;
    }
    for (std::size_t i = 0; i < features; ++i) span.set_grad(i, gradient[i]);
    h.lr = 0.01 * (1 - step / 4001.0);
    EXPECT_TRUE(update(span.all(), h, step, arena));
  }
  const Span trained = split ? span.joined(arena) : span;
  double loss = 0;
  for (std::size_t s = 0; s < samples; ++s)
    loss += std::pow(error(trained, s), 2) / static_cast<double>(samples);
  return loss;
}

TEST(Bf16Moments, TrainAsWellAsFp32Moments) {
  const double exact = regression_loss(DType::f32, false);
  EXPECT_LT(exact, 0.02);  // near the noise of the targets, 0.01; an untrained model has 48
  EXPECT_EQ(regression_loss(DType::f32, true), exact);
  EXPECT_NEAR(regression_loss(DType::bf16, true), exact, 0.02 * exact);
}

TEST(Bf16Moments, RefusesOtherTypes) {
  Arena arena(1);
  Span span = random_span(8, DType::f32, DType::f32, DType::bf16);
  SpanUpdate u = span.all();
  u.moment_dtype = DType::f16;
  testing::expect_error(ErrorKind::usage, "moments must be fp32, bf16 or uint8, not fp16",
                        [&] { update(u, Hyper(), 1, arena); });
  u = span.all(), u.first_element = -1;
  testing::expect_error(ErrorKind::usage, "8 elements from -1", [&] { update(u, Hyper(), 1, arena); });
}

}  // namespace
}  // namespace sherd::optim
