// Schedules over tensor, context, data and pipeline ranks, all at once: steps of many micro-batches as a
// plain computation in double makes them, and the same bits whatever runs when and where.
#include <gtest/gtest.h>

#include <optional>

#include "tests/engine/cut_runs.h"

namespace sherd::test {
namespace {

struct LayoutSchedule {
  const char* schedule;
  int stages, virtual_stages;
};
const LayoutSchedule layout_schedules[] = {
    {"accumulate", 1, 1},  {"layered", 1, 1},    {"gpipe", 1, 1}, {"interleaved", 1, 4},
    {"zero_bubble", 1, 1}, {"gpipe", 2, 1},      {"1f1b", 2, 1},  {"interleaved", 2, 2},
    {"zero_bubble", 2, 1}, {"zero_bubble", 4, 1}};

class LayoutSchedules : public ::testing::TestWithParam<Sizes> {};

/// Six micro-batches, each with its share of the mean on every schedule: in double, and the same bits.
TEST_P(LayoutSchedules, TrainAsOneRankInDouble) {
  const cut::Weights initial = cut::weights_of(on_all({.sizes = {1, 1, 1}}, [](Engine&) {}));
  for (const int stage : {1, 3}) {
    std::optional<Outcome> first;
    for (const LayoutSchedule& variant : layout_schedules) {
      Spec run{.sizes = GetParam(), .stage = stage, .accumulation = 6, .clipping = 0.2};
      run.schedule = variant.schedule, run.virtual_stages = variant.virtual_stages,
      run.sizes.stages = variant.stages;
      if (run.sizes.ranks() > 16) continue;
      SCOPED_TRACE(cat(variant.schedule, ", ", variant.stages, " stages of ", variant.virtual_stages,
                       ", ZeRO ", stage));
      Outcome outcome = outcome_of(run, 2);
      cut::Weights weights = initial;
      for (std::size_t step = 0; step < outcome.losses.size(); ++step) {
        const cut::Step expected = cut::train_step(weights, static_cast<int>(step), run.sizes.data,
                                                   run.accumulation, 0.1, run.clipping);
        EXPECT_NEAR(outcome.losses[step], expected.loss, 1e-6);
        EXPECT_NEAR(outcome.norms[step], expected.norm, 1e-6);
      }
      expect_near(outcome.states, weights);
      if (!first) first = outcome;
      EXPECT_TRUE(outcome == *first);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, LayoutSchedules,
                         ::testing::Values(Sizes{1, 1, 1}, Sizes{1, 1, 2}, Sizes{2, 1, 1, false},
                                           Sizes{2, 2, 2}),
                         [](const auto& test) { return test.param.text(); });

}  // namespace
}  // namespace sherd::test
