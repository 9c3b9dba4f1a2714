// Rates corrected by what was measured, against factors that are known.
#include "planning/correction.h"

#include <gtest/gtest.h>

#include "planning/search.h"

namespace sherd::planning {
namespace {

/// A step of these seconds of kernels, exchanges and update, and what it takes where all three are slower.
MeasuredStep step(double kernels, double exchange, double update, const Correction& by) {
  engine::StepTime time;
  time.kernels[0] = kernels, time.reduce = exchange, time.update = update;
  time.seconds = kernels + exchange + update;
  return {time, by.kernels * kernels + by.exchange * exchange + by.update * update};
}

TEST(Correction, FindsTheFactorsOfEachPart) {
  const Correction by{1.2, 0.7, 1.5};
  std::vector<MeasuredStep> steps;
  for (const auto& [kernels, exchange, update] :
       {std::array{1.0, 0.1, 0.5}, {1.0, 0.6, 0.1}, {0.7, 1.0, 0.3}, {0.5, 0.2, 1.0}, {1.0, 1.0, 1.0}})
    steps.push_back(step(kernels, exchange, update, by));
  const Correction found = correction_of(steps);
  EXPECT_NEAR(found.kernels, by.kernels, 0.02);
  EXPECT_NEAR(found.exchange, by.exchange, 0.03);
  EXPECT_NEAR(found.update, by.update, 0.03);
  // Also where the rates are of quite another machine.
  for (MeasuredStep& each : steps) each.seconds *= 100;
  EXPECT_NEAR(correction_of(steps).kernels, 100 * found.kernels, 3);
}

TEST(Correction, LeavesWhatStepsSayNothingOf) {
  const Correction none = correction_of({});
  EXPECT_EQ(none.kernels, 1);
  EXPECT_EQ(none.exchange, 1);
  EXPECT_EQ(none.update, 1);
  std::vector<MeasuredStep> steps;
  for (const double kernels : {1.0, 2.0, 3.0}) steps.push_back(step(kernels, 0, 1e-3, {1.3, 1, 1}));
  const Correction found = correction_of(steps);
  EXPECT_NEAR(found.kernels, 1.3, 0.01);
  EXPECT_EQ(found.exchange, 1);
  EXPECT_NEAR(found.update, 1, 0.01);
}

config::Machine four_cards() {
  return config::parse_machine(R"({"name": "four cards", "devices": 4, "memory": "64GB",
    "rates": [{"bandwidth": 1e12, "latency": 4e-6, "overlap": 0, "update": 8e11,
      "families": [{"family": "norm", "bandwidth": 5e11}],
      "products": [{"dtype": "bf16", "peak": 1e14, "efficiency": 0.5,
        "attention": {"forward": 0.3, "backward": 0.2}}]}],
    "links": [{"name": "near", "bandwidth": 1e10, "latency": 1e-5}], "host": {"memory": "1TB"}})");
}

/// A step by corrected rates takes each part's factor: nothing overlaps here.
TEST(Correction, SlowsAMachineDownPartByPart) {
  const config::Config config = config::parse_text(R"({"bf16": {"enabled": true}, "train_batch_size": 8,
    "optimizer": {"type": "AdamW"}, "parallel": {"tensor": 2}, "zero_optimization": {"stage": 1},
    "model": {"type": "gpt2", "seq_length": 512, "hidden_size": 512, "num_layers": 4, "num_heads": 8}})");
  const auto of = [&](const Correction& by) {
    return plan_as_is(config, corrected(four_cards(), by), 4096, 4).time;
  };
  const auto kernels = [](const engine::StepTime& time) {
    double sum = 0;
    for (const double each : time.kernels) sum += each;
    return sum;
  };
  const auto exchange = [](const engine::StepTime& time) {
    return time.exchange + time.reduce + time.gather;
  };
  const engine::StepTime before = of({});
  EXPECT_EQ(before.seconds, plan_as_is(config, four_cards(), 4096, 4).time.seconds);
  EXPECT_NEAR(kernels(of({1.3, 1, 1})), 1.3 * kernels(before), 1e-3 * kernels(before));
  EXPECT_NEAR(exchange(of({1, 1.3, 1})), 1.3 * exchange(before), 1e-3 * exchange(before));
  // All of the update takes the factor but what it publishes, which travels.
  const engine::StepTime after = of({1, 1, 1.3}), published = of({1, 1, 1e-3});
  ASSERT_LT(published.update, 0.9 * before.update);
  EXPECT_NEAR(after.update - published.update, 1.3 * (before.update - published.update),
              2e-3 * before.update);
  EXPECT_EQ(kernels(after), kernels(before));
  // Faster rates, too, as far as shares of the peak allow.
  EXPECT_NEAR(kernels(of({0.9, 1, 1})), 0.9 * kernels(before), 1e-3 * kernels(before));
  const Correction all{1.3, 1.3, 1.3};
  EXPECT_NEAR(of(all).seconds, 1.3 * before.seconds, 1e-3 * before.seconds);
  EXPECT_NEAR(of(all).peak, before.peak, 1e-6 * before.peak) << "utilisation counts by the data sheet";
}

}  // namespace
}  // namespace sherd::planning
