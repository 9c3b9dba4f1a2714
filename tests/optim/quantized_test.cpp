// Moments in 8 bits against NumPy with bitsandbytes' published map (make_quantized_traces.py), and the same
// bits everywhere.
#include "optim/quantized.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "optim/isa/span_plan.h"
#include "quantized_traces.h"
#include "span_fixture.h"

namespace sherd::optim {
namespace {

namespace traces = quantized_traces;

constexpr std::int64_t elements = 600, blocks = 3;
constexpr std::array both{Code::signed_8bit, Code::unsigned_8bit};

struct Quantized {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  bool operator==(const Quantized&) const = default;
};

Quantized quantized(CpuIsa isa, Code code, std::span<const float> values, Arena& arena) {
  Quantized out{std::vector<std::uint8_t>(values.size()), std::vector<float>((values.size() + 255) / 256)};
  quantize(code, values, out.codes.data(), out.scales.data(), arena, isa);
  return out;
}

std::vector<float> values_of(Code code, const Quantized& from, Arena& arena) {
  std::vector<float> out(from.codes.size());
  dequantize(code, from.codes, 0, from.scales.data(), out.data(), arena);
  return out;
}

/// The script's formulas.
std::vector<float> numbers(Code code) {
  std::vector<float> out(elements);
  for (std::int64_t i = 0; i < elements; ++i) {
    const float x = static_cast<float>((i * 7919 + 13) % 2003 - 1001) / 1001.0f,
                y = x * static_cast<float>(std::pow(10.0, -static_cast<double>(i % 8)));
    out[static_cast<std::size_t>(i)] = code == Code::signed_8bit ? y : std::abs(y);
  }
  return out;
}
float gradient_of(std::int64_t i, std::int64_t step) {
  return static_cast<float>((i * 7919 + step * 104729) % 2003 - 1001) / 1001.0f *
         static_cast<float>(1 + i % 5);
}

std::span<const float, 256> published_map(Code code) {
  return code == Code::signed_8bit ? std::span(traces::signed_map) : std::span(traces::unsigned_map);
}

/// Codes may differ where a value is as far from one as from the other.
void expect_published(Code code, std::span<const float> values, const Quantized& mine,
                      std::span<const std::uint8_t> codes, std::span<const float> scales) {
  for (std::size_t b = 0; b < scales.size(); ++b) EXPECT_EQ(mine.scales[b], scales[b]) << b;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (mine.codes[i] == codes[i]) continue;
    const double x = static_cast<double>(values[i]) / static_cast<double>(scales[i / 256]);
    const auto distance = [&](std::uint8_t at) {
      return std::abs(x - static_cast<double>(published_map(code)[at]));
    };
    EXPECT_NEAR(distance(mine.codes[i]), distance(codes[i]), 1e-6 * std::abs(x))
        << "element " << i << ": code " << int{mine.codes[i]} << ", not " << int{codes[i]};
  }
}

TEST(Quantized, HasThePublishedMaps) {
  for (const Code code : both)
    for (std::size_t i = 0; i < 256; ++i) {
      const float theirs = published_map(code)[i];
      EXPECT_NEAR(map_of(code).values[i], theirs, 3e-6f * std::abs(theirs)) << "code " << i;
    }
}

TEST(Quantized, TakesTheCodesThatNumPyTakesOfThePublishedMap) {
  Arena arena(1);
  for (const CpuIsa isa : every_isa()) {
    SCOPED_TRACE(name_of(isa));
    const std::vector<float> x = numbers(Code::signed_8bit), sizes = numbers(Code::unsigned_8bit);
    expect_published(Code::signed_8bit, x, quantized(isa, Code::signed_8bit, x, arena), traces::signed_codes,
                     traces::signed_scales);
    expect_published(Code::unsigned_8bit, sizes, quantized(isa, Code::unsigned_8bit, sizes, arena),
                     traces::unsigned_codes, traces::unsigned_scales);
  }
}

/// The nearest value of the map, found by trying all, for numbers around every border between two; zero is no
/// second moment's but that which is zero.
TEST(Quantized, TakesTheNearestValue) {
  Arena arena(1);
  for (const Code code : both) {
    const std::span<const float, 256> map = map_of(code).values;
    std::vector<float> x;
    for (std::size_t i = 0; i + 1 < 256; ++i)
      for (const float shift : {-1e-3f, 1e-3f}) {
        const float middle = (map[i] + map[i + 1]) / 2;
        x.push_back(middle + shift * (map[i + 1] - map[i]));
        if (x.size() % 256 == 255) x.push_back(1);  // every block's scale is 1
      }
    while (x.size() % 256 != 0) x.push_back(1);
    for (const CpuIsa isa : every_isa()) {
      const Quantized mine = quantized(isa, code, x, arena);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const auto nearest =
            std::min_element(map.begin(), map.end(),
                             [&](float a, float b) { return std::abs(a - x[i]) < std::abs(b - x[i]); }) -
            map.begin();
        const bool never_zero = code == Code::unsigned_8bit && nearest == 0;
        EXPECT_EQ(int{mine.codes[i]}, never_zero ? 1 : nearest) << name_of(isa) << ": " << x[i];
      }
    }
  }
}

TEST(Quantized, ValuesGiveTheSameCodesAgain) {
  Arena arena(1);
  for (const Code code : both)
    for (const float scale : {1.0f, 1e-12f, 3e7f}) {
      std::vector<float> x = numbers(code);
      for (float& value : x) value *= scale;
      if (code == Code::signed_8bit) x[256] = -2 * scale, x[512] = 2 * scale, x[513] = -1.995f * scale;
      const Quantized once = quantized(cpu_isa(), code, x, arena);
      EXPECT_EQ(quantized(cpu_isa(), code, values_of(code, once, arena), arena), once) << scale;
    }
}

TEST(Quantized, ZerosAndWhatIsNextToZeroAreZeros) {
  Arena arena(1);
  for (const Code code : both)
    for (const float value : {0.0f, 0x1p-125f})
      for (const CpuIsa isa : every_isa()) {
        const Quantized mine = quantized(isa, code, std::vector<float>(300, value), arena);
        EXPECT_EQ(mine.scales, (std::vector<float>{0, 0}));
        EXPECT_EQ(values_of(code, mine, arena), std::vector<float>(300));
      }
}

TEST(Quantized, InstructionSetsAndThreadsDoNotShow) {
  Arena one(1), four(4);
  for (const Code code : both) {
    std::vector<float> x(200000 + 77);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double y =
          std::sin(static_cast<double>(i) * 1.7) * std::pow(10.0, -static_cast<double>(i % 97) / 12);
      x[i] = static_cast<float>(code == Code::signed_8bit ? y : y * y);
    }
    const Quantized expected = quantized(CpuIsa::portable, code, x, one);
    for (const CpuIsa isa : every_isa()) {
      EXPECT_EQ(quantized(isa, code, x, one), expected) << name_of(isa);
      EXPECT_EQ(quantized(isa, code, x, four), expected) << name_of(isa);
    }
  }
}

/// A span with 8-bit moments of zero.
struct SpanOfCodes : Span {
  Quantized m, v;
  SpanOfCodes(std::size_t n, DType grads, DType params)
      : Span(n, grads, params),
        m{std::vector<std::uint8_t>(n, 127), std::vector<float>((n + 255) / 256)},
        v{std::vector<std::uint8_t>(n, 0), std::vector<float>((n + 255) / 256)} {}

  SpanUpdate update(std::int64_t begin, std::int64_t end) {
    SpanUpdate u = Span::update(begin, end);
    u.moments[0] = m.codes.data() + begin, u.moments[1] = v.codes.data() + begin;
    u.scales[0] = m.scales.data() + begin / 256, u.scales[1] = v.scales.data() + begin / 256;
    u.moment_dtype = DType::u8;
    return u;
  }
};

Hyper adamw() {
  Hyper out = config::default_rule(config::OptimizerType::adamw);
  auto& own = out.as<config::AdamOptions>();
  out.lr = 0.01, own.beta1 = 0.9, own.beta2 = 0.99, own.eps = 1e-6, out.weight_decay = 0.1;
  return out;
}

/// A moment halfway between two values may have taken the other one in one of 50 steps.
constexpr int others_allowed = 2;

void expect_weights(const std::vector<float>& mine, std::span<const float> theirs) {
  int others = 0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_NEAR(mine[i], theirs[i], 1e-3) << i;
    others += std::abs(mine[i] - theirs[i]) > 1e-6f;
  }
  EXPECT_LE(others, others_allowed);
}
void expect_codes(const std::vector<std::uint8_t>& mine, std::span<const std::uint8_t> theirs) {
  int others = 0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_NEAR(mine[i], theirs[i], 3) << i;
    others += mine[i] != theirs[i];
  }
  EXPECT_LE(others, others_allowed);
}

TEST(AdamWInEightBits, FollowsNumPyWithThePublishedMapFor50Steps) {
  Arena arena(1);
  SpanOfCodes span(elements, DType::f32, DType::f32);
  for (std::int64_t i = 0; i < elements; ++i)
    span.master[static_cast<std::size_t>(i)] = static_cast<float>(i * 4813 % 997 - 498) / 498.0f;
  for (std::int64_t step = 1; step <= 50; ++step) {
    for (std::int64_t i = 0; i < elements; ++i)
      span.set_grad(static_cast<std::size_t>(i), gradient_of(i, step));
    ASSERT_TRUE(update(span.update(0, elements), adamw(), step, arena));
    if (step == 1) expect_weights(span.master, traces::weights_1);
    if (step == 10) expect_weights(span.master, traces::weights_10);
  }
  expect_weights(span.master, traces::weights_50);
  expect_codes(span.m.codes, traces::trained_signed_codes);
  expect_codes(span.v.codes, traces::trained_unsigned_codes);
  for (std::size_t b = 0; b < blocks; ++b) {
    EXPECT_FLOAT_EQ(span.m.scales[b], traces::trained_signed_scales[b]);
    EXPECT_FLOAT_EQ(span.v.scales[b], traces::trained_unsigned_scales[b]);
  }
}

/// Cuts at blocks, threads, instruction sets, and how weights are kept.
TEST(AdamWInEightBits, GivesTheSameBitsEverywhere) {
  constexpr std::int64_t n = 5 * 256 + 100;
  Arena one(1), four(4);
  for (const DType grads : {DType::f32, DType::bf16, DType::f16})
    for (const DType params : {DType::f32, DType::bf16, DType::f16}) {
      const auto trained = [&](CpuIsa isa, std::int64_t cut, Arena& arena, bool split) {
        SpanOfCodes span(n, grads, params);
        for (std::int64_t i = 0; i < n; ++i)
          span.master[static_cast<std::size_t>(i)] = static_cast<float>(i % 13 - 6) / 8;
        if (split) static_cast<Span&>(span) = span.as_split(one);
        for (std::int64_t step = 1; step <= 5; ++step) {
          for (std::int64_t i = 0; i < n; ++i)
            span.set_grad(static_cast<std::size_t>(i), gradient_of(i, step) / 4);
          for (std::int64_t at = 0; at < n; at += cut)
            EXPECT_TRUE(update(span.update(at, std::min(n, at + cut)), adamw(), step, arena, isa));
        }
        if (split) static_cast<Span&>(span) = span.joined(one);
        return std::tuple(span.master, span.m, span.v);
      };
      const auto expected = trained(CpuIsa::portable, n, one, false);
      for (const CpuIsa isa : every_isa()) {
        EXPECT_EQ(trained(isa, n, one, false), expected) << name_of(isa);
        EXPECT_EQ(trained(isa, 512, four, false), expected) << name_of(isa);
        if (params == DType::bf16) {
          EXPECT_EQ(trained(isa, 256, one, true), expected) << name_of(isa);
        }
      }
    }
}

/// A second moment that is not zero takes no code of zero, however small it is beside its block's largest.
TEST(Quantized, OnlyZeroIsASecondMomentOfZero) {
  Arena arena(1);
  std::vector<float> x(300);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = i % 7 == 3 ? 0 : 1e6f * std::pow(10.0f, -static_cast<float>(i % 40));
  for (const CpuIsa isa : every_isa()) {
    const Quantized mine = quantized(isa, Code::unsigned_8bit, x, arena);
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(mine.codes[i] == 0, x[i] == 0) << name_of(isa) << ": " << x[i];
  }
}

/// Gradients that come late, or on and off, down to a million times smaller than the one that sets their
/// block's scale: the worst for second moments that are rounded. What nearest codes leave is 28: gradients
/// whose squares are up to 7e-4 of the scale move a mean of squares that is a thousandth of that by less than
/// half of the way to the next code, so it stays, while the first moment follows them.
TEST(AdamWInEightBits, StepsAreBoundedWhateverGradientsDo) {
  Arena arena(1);
  constexpr std::int64_t n = 1024, steps = 3000;
  Hyper hyper = config::default_rule(config::OptimizerType::adamw);
  hyper.lr = 1, hyper.as<config::AdamOptions>().eps = 1e-15, hyper.weight_decay = 0;
  SpanOfCodes span(n, DType::f32, DType::f32);
  float largest = 0;
  for (std::int64_t step = 1; step <= steps; ++step) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t pattern = i / 256, within = i % 256, period = 1 + 100 * pattern;
      const bool on = step > steps * pattern / 4 && (i % 5 == 0 || step / period % 2 == 0);
      const double size = std::pow(10.0, -6.0 * static_cast<double>(within) / 255);
      span.set_grad(static_cast<std::size_t>(i), within == 0 ? 1 : on ? static_cast<float>(size) : 1e-6f);
    }
    std::fill(span.master.begin(), span.master.end(), 0.0f);
    ASSERT_TRUE(update(span.update(0, n), hyper, step, arena));
    for (const float moved : span.master) largest = std::max(largest, std::abs(moved));
  }
  EXPECT_LT(largest, 30);
  EXPECT_GT(largest, 15) << "these gradients are harmless";
}

/// A short block holds what is there: what lies behind it is not touched, and zero gradients without an eps
/// do not show.
TEST(AdamWInEightBits, LeavesAloneWhatIsBehindAShortBlock) {
  Arena arena(1);
  SpanOfCodes span(512, DType::f32, DType::f32);
  for (std::size_t i = 0; i < 512; ++i) span.set_grad(i, 1.0f), span.master[i] = 1;
  Hyper hyper = adamw();
  hyper.as<config::AdamOptions>().eps = 0;
  ASSERT_TRUE(update(span.update(0, 300), hyper, 1, arena));
  for (std::size_t i = 300; i < 512; ++i) {
    EXPECT_EQ(span.master[i], 1);
    EXPECT_EQ(int{span.m.codes[i]}, 127);
    EXPECT_EQ(int{span.v.codes[i]}, 0);
  }
  EXPECT_NE(span.master[299], 1);
}

TEST(AdamWInEightBits, TellsOfWhatIsNotFinite) {
  Arena arena(1);
  for (const std::size_t at : {std::size_t{3}, std::size_t{299}}) {
    SpanOfCodes span(300, DType::f32, DType::f32);
    span.set_grad(at, std::numeric_limits<float>::infinity());
    EXPECT_FALSE(update(span.update(0, 300), adamw(), 1, arena)) << at;
  }
}

TEST(AdamWInEightBits, OtherRulesAreRefused) {
  Arena arena(1);
  SpanOfCodes span(256, DType::f32, DType::f32);
  EXPECT_THROW(update(span.update(0, 256), config::default_rule(config::OptimizerType::lion), 1, arena),
               Error);
  SpanUpdate without = span.update(0, 256);
  without.scales[1] = nullptr;
  EXPECT_THROW(update(without, adamw(), 1, arena), Error);
}

}  // namespace
}  // namespace sherd::optim
