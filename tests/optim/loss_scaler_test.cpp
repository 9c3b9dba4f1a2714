#include "optim/loss_scaler.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/expect_error.h"

namespace sherd::optim {
namespace {

config::LossScaling settings(int power, std::int64_t window, int hysteresis, bool consecutive = false,
                             double min = 1) {
  config::LossScaling s;
  s.initial_scale_power = power, s.loss_scale_window = window, s.hysteresis = hysteresis;
  s.consecutive_hysteresis = consecutive, s.min_loss_scale = min;
  return s;
}

// Feeds one step per letter ('x' overflow, '.' clean) and gives the exponent of the scale after each.
std::vector<int> run(LossScaler& scaler, const std::string& steps) {
  std::vector<int> out;
  for (const char step : steps) {
    scaler.update(step == 'x');
    out.push_back(std::ilogb(scaler.scale()));
  }
  return out;
}

std::vector<int> run(const config::LossScaling& s, const std::string& steps) {
  LossScaler scaler(s);
  return run(scaler, steps);
}

using Powers = std::vector<int>;

TEST(LossScaler, FirstGrowthComesAfterWindowPlusOneSteps) {
  EXPECT_EQ(run(settings(8, 3, 1), "........"), (Powers{8, 8, 8, 9, 9, 9, 10, 10}));
}

TEST(LossScaler, GrowthCountsFromTheLastOverflow) {
  // Overflow at iteration 2: the next doublings are at 2 + window + 1 and every window after that.
  EXPECT_EQ(run(settings(8, 3, 1), "..x......."), (Powers{8, 8, 7, 7, 7, 7, 8, 8, 8, 9}));
}

TEST(LossScaler, HysteresisToleratesOverflowsOnce) {
  EXPECT_EQ(run(settings(8, 100, 3), "xxxxx"), (Powers{8, 8, 7, 6, 5}));
  EXPECT_EQ(run(settings(8, 100, 2), "x.x.x"), (Powers{8, 8, 7, 7, 6}));        // not refilled by clean steps
  EXPECT_EQ(run(settings(8, 2, 2), "x...x.x"), (Powers{8, 8, 8, 9, 9, 9, 8}));  // growth refills it
}

TEST(LossScaler, ConsecutiveHysteresisRefillsOnCleanSteps) {
  EXPECT_EQ(run(settings(8, 100, 2, true), "x.x.x"), (Powers{8, 8, 8, 8, 8}));
  EXPECT_EQ(run(settings(8, 100, 2, true), "xx.xx"), (Powers{8, 7, 7, 7, 6}));
}

TEST(LossScaler, StopsTheRunAtTheMinimum) {
  LossScaler scaler(settings(2, 100, 1, false, 2));
  EXPECT_EQ(run(scaler, "x"), Powers{1});
  const LossScaler::State before = scaler.state();
  testing::expect_error(ErrorKind::numerics, "at its minimum 2", [&] { scaler.update(true); });
  EXPECT_EQ(scaler.state(), before);
  LossScaler odd(settings(2, 100, 1, false, 3));  // the floor need not be a power of two
  odd.update(true);
  EXPECT_EQ(odd.scale(), 3);
}

TEST(LossScaler, StaticScaleNeverChanges) {
  config::LossScaling s = settings(16, 1, 1);
  s.loss_scale = 128;
  LossScaler scaler(s);
  for (int i = 0; i < 10; ++i) {
    scaler.update(i % 2 == 0);
    EXPECT_EQ(scaler.scale(), 128);
  }
}

TEST(LossScaler, RestoredContinuesTheSame) {
  const config::LossScaling s = settings(10, 3, 2, false, 0.75);
  LossScaler a(s);
  run(a, "..x..xx.x");
  LossScaler b(s);
  b.restore(a.save());
  EXPECT_EQ(a.state(), b.state());
  EXPECT_EQ(run(a, "....x.xxx...."), run(b, "....x.xxx...."));
  EXPECT_EQ(a.state(), b.state());
}

TEST(LossScaler, RefusesOtherText) {
  LossScaler scaler(settings(8, 3, 1));
  const std::string good = scaler.save();
  for (const std::string& bad : {std::string(), std::string("scale=1"), good + " ",
                                 std::string("scale=-0x1p+8 iteration=0 last_overflow=-1 hysteresis=1"),
                                 std::string("scale=0x1p+8 iteration=3 last_overflow=5 hysteresis=1")})
    testing::expect_error(ErrorKind::data, "no saved loss scaler", [&] { scaler.restore(bad); });
  EXPECT_EQ(scaler.save(), good);
}

}  // namespace
}  // namespace sherd::optim
