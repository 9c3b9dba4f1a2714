// Which micro-batches of a list keep their activations where the others recompute.
#include "sharding/schedule/schedules.h"

#include <gtest/gtest.h>

#include <set>

#include "sharding/schedule/check_lists.h"

namespace sherd::sharding {
namespace {

using config::Schedule;
using Op = Instruction::Op;

/// Whether each micro-batch keeps its activations; those of all its chunks do, or none.
std::vector<bool> kept(const std::vector<Instruction>& list, const ScheduleShape& shape) {
  std::vector<int> chunks(static_cast<std::size_t>(shape.micro_batches));
  for (const Instruction& i : list) {
    EXPECT_TRUE(i.op == Op::forward || !i.keeps_activations);
    if (i.keeps_activations) ++chunks[static_cast<std::size_t>(i.micro_batch)];
  }
  std::vector<bool> out;
  for (const int count : chunks) {
    EXPECT_TRUE(count == 0 || count == shape.chunks) << count;
    out.push_back(count > 0);
  }
  return out;
}

/// Narayanan et al. 2021, §2.2.1, for 1F1B; Huang et al. 2019 for GPipe; ZB-H1 has what 1F1B's first stage
/// has.
TEST(InFlight, AreAsManyAsThePapersSay) {
  for (int p = 1; p <= 8; ++p)
    for (std::int64_t m = 1; m <= 20; ++m) {
      ScheduleShape shape = shape_of(p, m);
      for (shape.stage = 0; shape.stage < p; ++shape.stage)
        EXPECT_EQ(most_in_flight(one_forward_one_backward(shape)),
                  std::min<std::int64_t>(m, p - shape.stage));
      shape.stage = 0;
      EXPECT_EQ(most_in_flight(gpipe(shape)), m);
      EXPECT_EQ(most_in_flight(zero_bubble(shape)), std::min<std::int64_t>(m, p));
      EXPECT_EQ(most_in_flight(layered(shape_of(1, m, p + 1))), m);
      EXPECT_EQ(most_in_flight(accumulate(shape_of(1, m))), 1);
    }
}

TEST(InFlight, AreMostOnTheFirstStage) {
  for (const Schedule schedule :
       {Schedule::gpipe, Schedule::one_forward_one_backward, Schedule::zero_bubble, Schedule::interleaved})
    for (int p = 1; p <= 8; ++p)
      for (const std::int64_t groups : {1, 2, 5}) {
        ScheduleShape shape = shape_of(p, groups * p, schedule == Schedule::interleaved ? 3 : 1);
        const std::int64_t first = most_in_flight(make_schedule(schedule, shape));
        for (shape.stage = 1; shape.stage < p; ++shape.stage)
          EXPECT_LE(most_in_flight(make_schedule(schedule, shape)), first);
      }
}

/// Megatron-LM, core/pipeline_parallel/schedules.py: of 1F1B, micro-batch k is checkpointed whole where
/// k % max_outstanding_backprops >= num_microbatches_with_partial_activation_checkpoints.
TEST(KeptActivations, OfOneForwardOneBackwardAreMegatrons) {
  for (int p = 1; p <= 6; ++p)
    for (std::int64_t m = 1; m <= 14; ++m)
      for (int stage = 0; stage < p; ++stage)
        for (std::int64_t most = 0; most <= p; ++most) {
          ScheduleShape shape = shape_of(p, m);
          shape.stage = stage;
          std::vector<Instruction> list = one_forward_one_backward(shape);
          const std::int64_t outstanding = p - stage;
          EXPECT_EQ(keep_activations(list, most), std::min({most, outstanding, m}));
          const std::vector<bool> keeps = kept(list, shape);
          for (std::int64_t k = 0; k < m; ++k)
            EXPECT_EQ(keeps[static_cast<std::size_t>(k)], k % outstanding < most)
                << "p = " << p << ", m = " << m << ", stage " << stage << ", " << most << ", k = " << k;
        }
}

/// A finished micro-batch makes room: one recomputes only where `most` others in flight keep.
TEST(KeptActivations, AreTheMostThatMayBe) {
  for (const Schedule schedule :
       {Schedule::gpipe, Schedule::zero_bubble, Schedule::interleaved, Schedule::layered})
    for (const std::int64_t most : {-1, 0, 1, 2, 3, 100}) {
      const int stages = schedule == Schedule::layered ? 1 : 3, chunks = schedule == Schedule::gpipe ? 1 : 2;
      ScheduleShape shape = shape_of(stages, 9, schedule == Schedule::zero_bubble ? 1 : chunks);
      for (shape.stage = 0; shape.stage < stages; ++shape.stage) {
        std::vector<Instruction> list = make_schedule(schedule, shape);
        keep_activations(list, most);
        const std::vector<bool> keeps = kept(list, shape);
        std::vector<int> left(9, shape.chunks);  // chunks of each micro-batch that are still to come back
        std::set<std::int64_t> begun;
        std::int64_t now = 0;
        const bool splits = schedule == Schedule::zero_bubble;
        for (const Instruction& i : list) {
          const auto at = static_cast<std::size_t>(i.micro_batch);
          if (i.op == Op::forward && begun.insert(i.micro_batch).second) {
            EXPECT_EQ(keeps[at], now < most) << "micro-batch " << i.micro_batch;
            now += keeps[at];
          }
          if (i.op == (splits ? Op::weight_gradients : Op::backward) && --left[at] == 0) now -= keeps[at];
        }
        EXPECT_EQ(now, 0);
      }
    }
}

}  // namespace
}  // namespace sherd::sharding
