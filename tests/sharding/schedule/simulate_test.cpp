// The time that steps of schedules take, against the formulas of the papers.
#include "sharding/schedule/simulate.h"

#include <gtest/gtest.h>

#include "sharding/schedule/check_lists.h"
#include "support/expect_error.h"

namespace sherd::sharding {
namespace {

using config::Schedule;
using testing::expect_error;

struct Seconds {
  double forward = 1, backward = 1, weights = 1, transfer = 0, gather = 0;

  InstructionTime operator()(int, const Instruction& i) const { return {of(i)}; }

  double of(const Instruction& i) const {
    switch (i.op) {
      case Op::forward:
        return forward;
      case Op::backward:
        return backward + weights;
      case Op::backward_input:
        return backward;
      case Op::weight_gradients:
        return weights;
      case Op::send_activation:
      case Op::send_gradient:
        return transfer;
      case Op::gather:
        return gather;
      default:
        return 0;
    }
  }
};

SimulatedStep simulated(Schedule schedule, int stages, std::int64_t micro_batches, int chunks,
                        const Seconds& seconds) {
  ScheduleShape shape;
  shape.stages = stages;
  shape.micro_batches = micro_batches;
  shape.chunks = chunks;
  return simulate(lists_of(schedule, shape), seconds);
}

TEST(Simulate, BubblesAreThoseOfThePapers) {
  const Seconds seconds{1.0, 1.25, 0.75};
  for (const double p : {1, 2, 4, 8, 16})
    for (const double m : {1 * p, 2 * p, 4 * p}) {
      const auto bubble = [&, p = int(p), m = std::int64_t(m)](Schedule schedule, int chunks = 1) {
        return simulated(schedule, p, m, chunks, seconds).bubble();
      };
      EXPECT_NEAR(bubble(Schedule::gpipe), (p - 1) / m, 1e-12);
      EXPECT_NEAR(bubble(Schedule::one_forward_one_backward), (p - 1) / m, 1e-12);
      for (const int v : {2, 3, 8})
        EXPECT_NEAR(bubble(Schedule::interleaved, v), (p - 1) / (v * m), 1e-12) << p << " " << m << " " << v;
      // Qi et al., table 1: (p − 1)(tF + tB − tW), of m (tF + tB + tW).
      EXPECT_NEAR(bubble(Schedule::zero_bubble), (p - 1) * 1.5 / (m * 3), 1e-12) << p << " " << m;
      EXPECT_LE(bubble(Schedule::zero_bubble), bubble(Schedule::one_forward_one_backward) / 2 + 1e-12);
    }
}

TEST(Simulate, TransfersHideBehindComputingButWhereThePipelineFillsAndDrains) {
  EXPECT_NEAR(simulated(Schedule::gpipe, 4, 8, 1, {1, 1, 1, 0.5}).seconds, 11 * 3 + 2 * 3 * 0.5, 1e-12);
  const double slow = 5;  // seconds of a transfer, which is what the step comes to
  EXPECT_NEAR(simulated(Schedule::gpipe, 2, 8, 1, {1, 1, 1, slow}).seconds, 1 + 8 * slow + 3 + 8 * slow + 2,
              1e-12);
}

TEST(Simulate, ParametersOfLayersHideBehindTheLayerBefore) {
  const auto seconds = [](double gather) {
    return simulated(Schedule::layered, 1, 8, 5, {1, 1, 1, 0, gather}).seconds;
  };
  EXPECT_NEAR(seconds(8), 8 + 5 * 8 * 3, 1e-12);
  EXPECT_NEAR(seconds(100), 5 * 100 + 8 * 3 + 3 * 100 + 8 * 2, 1e-12)
      << "five come for forward, three for backward";
}

TEST(Simulate, OneSlowStageHoldsAllOthersUp) {
  const SimulatedStep step =
      simulate(lists_of(Schedule::one_forward_one_backward, {.stages = 3, .micro_batches = 6}),
               [](int stage, const Instruction& i) {
                 return InstructionTime{Seconds().of(i) * (stage == 1 ? 2 : 1)};
               });
  EXPECT_NEAR(step.seconds, 1 + 6 * 6 + 1 + 2, 1e-12)
      << "two forwards do not last until the first gradient is there";
  EXPECT_EQ(step.computing, (std::vector<double>{18, 36, 18}));
  EXPECT_NEAR(step.bubble(), 40 * 3 / 72.0 - 1, 1e-12);
}

TEST(Simulate, WhatRunsBesideTheListIsWaitedForBeforeTheUpdate) {
  const auto step_of = [](double beside, double behind) {
    return simulate(lists_of(Schedule::gpipe, {.stages = 1, .micro_batches = 2}),
                    [=](int, const Instruction& i) -> InstructionTime {
                      if (i.op != Instruction::Op::backward)
                        return {i.op == Instruction::Op::forward ? 1.0 : 0};
                      return {2, beside, 0.5, behind};
                    });
  };
  EXPECT_NEAR(step_of(1, 0.25).seconds, 6 + 0.25, 1e-12) << "all but the last bucket hides";
  EXPECT_NEAR(step_of(1, 0.25).waiting[0], 0.25, 1e-12);
  EXPECT_NEAR(step_of(3, 0.25).seconds, 2 + 0.5 + 3 + 3, 1e-12) << "one after the other";
  EXPECT_NEAR(step_of(0, 0).waiting[0], 0, 1e-12);
}

TEST(Simulate, TellsListsThatWaitForEachOther) {
  const std::vector<Instruction> first = {{Op::forward, 0}, {Op::receive_gradient, 0}, {Op::backward, 0}};
  const std::vector<Instruction> second = {{Op::receive_activation, 0}, {Op::forward, 0}, {Op::backward, 0}};
  expect_error(ErrorKind::usage, "waits for ever: stage 0 for the input of backward of micro-batch 0", [&] {
    simulate({first, second}, Seconds());
  });
  Lists swapped = lists_of(Schedule::gpipe, {.stages = 2, .micro_batches = 2});
  for (Instruction& i : swapped[1])
    if (i.op == Op::receive_activation || i.op == Op::forward) i.micro_batch = 1 - i.micro_batch;
  expect_error(ErrorKind::usage, "was sent where micro-batch 1", [&] { simulate(swapped, Seconds()); });
}

}  // namespace
}  // namespace sherd::sharding
