#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include "config/config.h"
#include "optim/schedule_traces.h"
#include "optim/trainer_traces.h"
#include "support/expect_error.h"

namespace sherd::optim {
namespace {

config::Scheduler parse(const std::string& type, const std::string& params) {
  return config::parse_text(R"({"scheduler": {"type": ")" + type + R"(", "params": )" + params + "}}")
      .scheduler;
}

// Same bits are not asked for: DeepSpeed forms some fractions in another order.
void expect_trace(const double (&want)[25][2], const std::string& type, const std::string& params) {
  SCOPED_TRACE(type + " " + params);
  LrSchedule schedule(parse(type, params), 0.05, true);
  for (std::size_t i = 0; i < 25; ++i) {
    const SchedulePoint point = schedule.current();
    EXPECT_NEAR(point.lr, want[i][0], 1e-15) << "t = " << schedule.last_batch_iteration();
    EXPECT_EQ(point.betas.has_value(), type == "OneCycle");
    EXPECT_NEAR(point.betas ? point.betas->first : 0.9, want[i][1], 1e-15)
        << "t = " << schedule.last_batch_iteration();
    schedule.step();
  }
}

TEST(LrSchedule, FollowsTransformers) {
  const auto expect = [](const double(&want)[25], const std::string& type, const std::string& params) {
    SCOPED_TRACE(type + " " + params);
    LrSchedule schedule(parse(type, params), 0.05, true);
    for (std::size_t i = 0; i < 25; ++i, schedule.step()) EXPECT_NEAR(schedule.get_lr(), want[i], 1e-17) << i;
  };
  using namespace trainer_traces;
  expect(linear, "linear", R"({"warmup_num_steps": 4, "total_num_steps": 20})");
  expect(linear_short, "linear", R"({"warmup_num_steps": 30, "total_num_steps": 20})");
  expect(linear_plain, "linear", R"({"total_num_steps": 23})");
  expect(trainer_traces::cosine, "cosine", R"({"warmup_num_steps": 5, "total_num_steps": 25})");
  expect(constant, "constant_with_warmup", R"({"warmup_num_steps": 6})");
}

TEST(LrSchedule, FollowsDeepSpeed) {
  using namespace schedule_traces;
  expect_trace(
      range_test, "LRRangeTest",
      R"({"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0})");
  expect_trace(range_stairs, "LRRangeTest", R"({"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3,
      "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": true})");
  expect_trace(warmup_log, "WarmupLR",
               R"({"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 6})");
  expect_trace(warmup_linear, "WarmupLR", R"({"warmup_num_steps": 6, "warmup_type": "linear"})");
  expect_trace(warmup_one, "WarmupLR", R"({"warmup_num_steps": 1})");
  expect_trace(decay, "WarmupDecayLR",
               R"({"total_num_steps": 15, "warmup_min_lr": 0.001, "warmup_num_steps": 5})");
  expect_trace(decay_short, "WarmupDecayLR",
               R"({"total_num_steps": 4, "warmup_num_steps": 6, "warmup_type": "linear"})");
  expect_trace(
      cosine, "WarmupCosineLR",
      R"({"total_num_steps": 16, "warmup_num_steps": 4, "warmup_min_ratio": 0.05, "cos_min_ratio": 0.1})");
  expect_trace(cosine_short, "WarmupCosineLR",
               R"({"total_num_steps": 3, "warmup_num_steps": 4, "warmup_type": "linear"})");
  expect_trace(cycle, "OneCycle",
               R"({"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5})");
  expect_trace(cycle_decay, "OneCycle",
               R"({"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4,
      "cycle_second_step_size": 7, "decay_lr_rate": 0.5, "decay_step_size": 3, "cycle_min_mom": 0.6,
      "cycle_max_mom": 0.8, "decay_mom_rate": 0.02})");
  expect_trace(cycle_stairs, "OneCycle",
               R"({"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6,
      "cycle_second_step_size": 9, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4})");
}

// Worked out by hand from the formulas, independent of the traces.
TEST(LrSchedule, FollowsTheFormulas) {
  const LrSchedule warmup(parse("WarmupLR", R"({"warmup_num_steps": 4, "warmup_max_lr": 0.8})"), 1, true);
  EXPECT_EQ(warmup.at(-1).lr, 0);
  EXPECT_EQ(warmup.at(0).lr, 0);           // ln 1: the first two steps run at the minimum
  EXPECT_DOUBLE_EQ(warmup.at(1).lr, 0.4);  // ln 2 / ln 4
  EXPECT_EQ(warmup.at(4).lr, 0.8);
  const LrSchedule cosine(
      parse("WarmupCosineLR", R"({"total_num_steps": 12, "warmup_num_steps": 4, "cos_min_ratio": 0.2})"), 2,
      true);
  EXPECT_EQ(cosine.at(-1).lr, 0);
  EXPECT_DOUBLE_EQ(cosine.at(7).lr, 2 * 0.6);  // half way: 0.2 + 0.8/2
  EXPECT_DOUBLE_EQ(cosine.at(11).lr, 2 * 0.2);
  EXPECT_DOUBLE_EQ(cosine.at(1000).lr, 2 * 0.2);  // stays there
  const LrSchedule cycle(
      parse("OneCycle", R"({"cycle_min_lr": 1, "cycle_max_lr": 3, "cycle_first_step_size": 2})"), 9, true);
  EXPECT_EQ(cycle.at(0).lr, 2);
  EXPECT_EQ(cycle.at(1).lr, 3);
  EXPECT_DOUBLE_EQ(cycle.at(1).betas->first, 0.8);
  EXPECT_EQ(cycle.at(1).betas->second, 0.99);
  EXPECT_EQ(cycle.at(5).lr, 1);
}

TEST(LrSchedule, WithoutASchedulerKeepsTheRate) {
  LrSchedule schedule({}, 0.3, true);
  for (int i = 0; i < 5; ++i, schedule.step()) EXPECT_EQ(schedule.current(), (SchedulePoint{0.3, {}}));
}

TEST(LrSchedule, CyclesMomentumOnlyWhereThereAreBetas) {
  const config::Scheduler cycle = parse("OneCycle", R"({"cycle_min_lr": 0, "cycle_max_lr": 1})");
  EXPECT_TRUE(LrSchedule(cycle, 1, true).current().betas.has_value());
  EXPECT_FALSE(LrSchedule(cycle, 1, false).current().betas.has_value());
  const config::Scheduler still =
      parse("OneCycle", R"({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": false})");
  EXPECT_FALSE(LrSchedule(still, 1, true).current().betas.has_value());
}

TEST(LrSchedule, MomentumStaysBelowOne) {
  const LrSchedule cycle(
      parse("OneCycle", R"({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 1,
      "decay_step_size": 1, "decay_mom_rate": 1})"),
      1, true);
  EXPECT_LT(cycle.at(1000).betas->first, 1);
}

TEST(LrSchedule, SavesAndRestores) {
  const config::Scheduler scheduler = parse("WarmupLR", R"({"warmup_num_steps": 50})");
  LrSchedule a(scheduler, 1, true);
  for (int i = 0; i < 17; ++i) a.step();
  LrSchedule b(scheduler, 1, true);
  b.restore(a.save());
  EXPECT_EQ(b.last_batch_iteration(), 16);
  EXPECT_EQ(b.current(), a.current());
  for (const char* bad : {"", "x", "17x", "-2"})
    testing::expect_error(ErrorKind::data, "is no saved schedule", [&] { b.restore(bad); });
  EXPECT_EQ(b.last_batch_iteration(), 16);
}

}  // namespace
}  // namespace sherd::optim
