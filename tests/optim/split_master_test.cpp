#include "optim/split_master.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "optim/span_fixture.h"
#include "support/expect_error.h"

namespace sherd::optim {
namespace {

using Bits = std::vector<std::uint32_t>;

std::vector<float> as_floats(const Bits& bits) {
  std::vector<float> out;
  for (const std::uint32_t b : bits) out.push_back(std::bit_cast<float>(b));
  return out;
}

// All 2^16 low halves below zeros, denormals, ordinary values of both signs, the largest, infinity and NaN.
TEST(SplitMaster, EveryBitPatternComesBack) {
  Arena arena(2);
  Bits bits;
  for (const std::uint32_t high :
       {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f7fu, 0x3f80u, 0x7f7fu, 0x7f80u, 0x7fc0u, 0x7fffu, 0x8000u,
        0x8001u, 0xbf80u, 0xc2ffu, 0xff7fu, 0xff80u, 0xffffu})
    for (std::uint32_t low = 0; low < 0x10000; ++low) bits.push_back(high << 16 | low);
  const std::vector<float> master = as_floats(bits);
  const auto n = static_cast<std::int64_t>(master.size());
  for (const CpuIsa isa : every_isa()) {
    std::vector<std::uint16_t> high(master.size()), low(master.size());
    std::vector<float> back(master.size());
    split_master(master.data(), high.data(), low.data(), n, arena, isa);
    join_master(high.data(), low.data(), back.data(), n, arena, isa);
    ASSERT_EQ(std::memcmp(back.data(), master.data(), master.size() * 4), 0) << name_of(isa);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      ASSERT_EQ(low[i], bits[i] & 0xffff) << name_of(isa);
      ASSERT_EQ(high[i], round_master_to_bf16(master[i]).bits) << name_of(isa) << " " << std::hex << bits[i];
    }
  }
}

TEST(SplitMaster, AnyLengthAtAnyAddress) {
  Arena arena(1);
  std::vector<float> master(100), back(101);
  for (std::size_t i = 0; i < 100; ++i) master[i] = normal_at({1, 2}, i);
  for (const CpuIsa isa : every_isa())
    for (std::int64_t n = 0; n <= 99; ++n) {
      std::vector<std::uint16_t> high(101, 7), low(101, 7);
      std::fill(back.begin(), back.end(), 7.0f);
      split_master(master.data() + 1, high.data() + 1, low.data() + 1, n, arena, isa);
      join_master(high.data() + 1, low.data() + 1, back.data() + 1, n, arena, isa);
      ASSERT_EQ(std::memcmp(back.data() + 1, master.data() + 1, static_cast<std::size_t>(n) * 4), 0);
      const auto end = static_cast<std::size_t>(n) + 1;
      ASSERT_TRUE(high[0] == 7 && low[0] == 7 && back[0] == 7 && high[end] == 7 && low[end] == 7 &&
                  back[end] == 7);
    }
}

// Masters that a rounding could betray: zeros of both signs, denormals, ties of the bf16 rounding and their
// neighbours, values that cross a power of two, large and tiny ones.
std::vector<float> awkward_masters() {
  Bits bits;
  for (const std::uint32_t sign : {0u, 0x80000000u})
    for (const std::uint32_t high :
         {0x0000u, 0x0001u, 0x0080u, 0x1a2bu, 0x3a83u, 0x3f7fu, 0x3f80u, 0x40ffu, 0x7e00u})
      for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xfffeu, 0xffffu})
        bits.push_back(sign | high << 16 | low);
  return as_floats(bits);
}

// Steps one span with fp32 and with split masters on every instruction set, and compares all of it.
void expect_same_as_whole(const Span& start, const Hyper& hyper, int steps) {
  Arena arena(1);
  for (const CpuIsa isa : every_isa()) {
    Span whole = start, split = start.as_split(arena);
    for (int step = 1; step <= steps; ++step) {
      for (std::size_t i = 0; i < start.grad.size(); ++i) {
        const float factor = 1.0f + 0.5f * normal_at({9, static_cast<std::uint64_t>(step)}, i);
        whole.set_grad(i, start.grad.get(i) * factor), split.set_grad(i, start.grad.get(i) * factor);
      }
      const bool finite = update(whole.all(), hyper, step, arena, isa);
      ASSERT_EQ(update(split.all(), hyper, step, arena, isa), finite);
      ASSERT_TRUE(split.joined(arena) == whole) << name_of(isa) << ", step " << step;
    }
    ASSERT_FALSE(whole == start);
  }
}

TEST(SplitMaster, TrainsAsFp32MastersToTheBit) {
  const std::vector<float> awkward = awkward_masters();
  for (const DType moments : {DType::f32, DType::bf16})
    for (const Hyper& hyper : every_rule())
      for (const DType grads : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE(cat("gradients ", name_of(grads), ", moments ", name_of(moments)));
        Span span = random_span(331, grads, DType::bf16, moments);
        std::copy(awkward.begin(), awkward.end(), span.master.begin());
        expect_same_as_whole(span, hyper, 25);
      }
}

TEST(SplitMaster, SmallStepsAddUp) {
  // Steps of a 2^-12th of the weight, which a bf16 weight alone would lose each time.
  Arena arena(1);
  Hyper sgd = config::default_rule(config::OptimizerType::sgd);
  sgd.lr = 0x1p-12;
  Span span(40, DType::bf16, DType::bf16);
  for (std::size_t i = 0; i < 40; ++i) span.master[i] = 1, span.set_grad(i, -1);
  Span split = span.as_split(arena);
  for (int step = 1; step <= 1024; ++step) ASSERT_TRUE(update(split.all(), sgd, step, arena));
  for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(split.param.get(i), 1.25f);
}

TEST(SplitMaster, LargeSpansAreNotStreamed) {
  Arena arena(2);
  Hyper h;
  Span whole(std::size_t{1} << 22, DType::bf16, DType::bf16);
  for (std::size_t i = 0; i < whole.master.size(); ++i) {
    whole.master[i] = static_cast<float>(i % 8191) * 1.1e-4f;
    whole.set_grad(i, static_cast<float>(i % 251) * 1e-3f);
  }
  Span split = whole.as_split(arena);
  ASSERT_TRUE(update(whole.all(), h, 1, arena));
  ASSERT_TRUE(update(split.all(), h, 1, arena));
  EXPECT_TRUE(split.joined(arena) == whole);
}

TEST(SplitMaster, ReportsNonFiniteUpdates) {
  Arena arena(1);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Hyper h;
  for (const float grad : {inf, -inf, nan})
    for (const std::size_t n : {std::size_t{3}, std::size_t{1000}})
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        Span span = random_span(n, DType::bf16, DType::bf16).as_split(arena);
        ASSERT_TRUE(update(span.all(), h, 1, arena));
        span.set_grad(at, grad);
        EXPECT_FALSE(update(span.all(), h, 2, arena)) << grad << " at " << at << " of " << n;
      }
  // The largest master whose high half is finite, and the next.
  const Hyper still = config::default_rule(config::OptimizerType::sgd);
  for (const auto& [bits, finite] :
       {std::pair{0x7f7f7fffu, true}, {0x7f7f8000u, false}, {0xff7f8000u, false}}) {
    Span span(9, DType::f32, DType::bf16);
    span.master[4] = std::bit_cast<float>(bits);
    Span split = span.as_split(arena);
    EXPECT_EQ(update(split.all(), still, 1, arena), finite) << std::hex << bits;
  }
}

TEST(SplitMaster, RefusesIncompleteSpans) {
  Arena arena(1);
  Span span = random_span(8, DType::f32, DType::bf16).as_split(arena);
  const auto refused = [&](const std::string& part, auto change) {
    SpanUpdate u = span.all();
    change(u);
    testing::expect_error(ErrorKind::usage, part, [&] { update(u, Hyper(), 1, arena); });
  };
  refused("both an fp32 and a split master", [&](SpanUpdate& u) { u.master = span.master.data(); });
  refused("need a bf16 parameter, not fp16", [](SpanUpdate& u) { u.param_dtype = DType::f16; });
  refused("no memory for it", [](SpanUpdate& u) { u.param = nullptr; });
  testing::expect_error(ErrorKind::usage, "split_master: no memory",
                        [&] { split_master(nullptr, nullptr, nullptr, 3, arena); });
  testing::expect_error(ErrorKind::usage, "join_master: no memory",
                        [&] { join_master(nullptr, nullptr, nullptr, 3, arena); });
}

}  // namespace
}  // namespace sherd::optim
