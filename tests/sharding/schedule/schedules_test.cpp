// Lists of pipelines and of layered accumulation: what must hold for every shape, and the orders that papers
// and Megatron-LM print.
#include "sharding/schedule/schedules.h"

#include <gtest/gtest.h>

#include "sharding/schedule/check_lists.h"
#include "support/expect_error.h"

namespace sherd::sharding {
namespace {

using config::Schedule;
using testing::expect_error;

/// The most that papers allow to be in flight.
std::int64_t most_that_papers_allow(Schedule schedule, const ScheduleShape& shape) {
  const std::int64_t m = shape.micro_batches, later = shape.stages - shape.stage - 1;
  switch (schedule) {
    case Schedule::one_forward_one_backward:
      return std::min(m, later + 1);
    case Schedule::zero_bubble:
      return std::min<std::int64_t>(m, shape.stages);
    case Schedule::interleaved:
      return std::min(m * shape.chunks,
                      2 * later + (shape.chunks - 1) * (shape.group ? shape.group : shape.stages) + 1);
    default:
      return m;
  }
}

/// The first rule that the lists of this shape break; empty: none.
std::string violation(Schedule schedule, ScheduleShape shape) {
  shape.early_update = (shape.micro_batches + shape.chunks) % 2 == 0;
  const Lists lists = lists_of(schedule, shape);
  for (shape.stage = 0; shape.stage < shape.stages; ++shape.stage) {
    const std::int64_t most = most_that_papers_allow(schedule, shape);
    ListCheck check(shape, most);
    const std::string wrong = check.run(lists[static_cast<std::size_t>(shape.stage)]);
    if (!wrong.empty()) return wrong;
    if (schedule != Schedule::zero_bubble && check.largest() != most)
      return cat("stage ", shape.stage, " has ", check.largest(), " in flight, not ", most);
  }
  // Gradients for a larger group wait at the first stage until the whole group has passed it.
  const std::int64_t waits = shape.group > 0 ? shape.group - shape.stages : 0;
  return Rendezvous(lists, waits + 1).run();
}

TEST(Schedules, EveryShapeOfOneChunkIsInOrderBoundedAndWithoutDeadlock) {
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_forward_one_backward, Schedule::zero_bubble})
    for (int p = 1; p <= 16; ++p)
      for (std::int64_t m = 1; m <= 64; ++m)
        ASSERT_EQ(violation(schedule, shape_of(p, m)), "")
            << "schedule " << static_cast<int>(schedule) << ", p = " << p << ", m = " << m;
}

/// The default group where it serves, and one other that does.
TEST(Schedules, EveryInterleavedShapeIsInOrderBoundedAndWithoutDeadlock) {
  const auto serves = [](std::int64_t m, int p, std::int64_t group) {
    return m % group == 0 || m % group >= p;
  };
  for (int p = 1; p <= 16; ++p)
    for (std::int64_t m = p; m <= 64; ++m)
      for (int v = 2; v <= 8; ++v) {
        if (m % p == 0) {
          ASSERT_EQ(violation(Schedule::interleaved, shape_of(p, m, v)), "")
              << "p = " << p << ", m = " << m << ", v = " << v;
        }
        std::int64_t group = p + 1 + (m * v) % p;
        while (group < m && !serves(m, p, group)) ++group;
        ASSERT_EQ(violation(Schedule::interleaved, shape_of(p, m, v, std::min(group, m))), "")
            << "p = " << p << ", m = " << m << ", v = " << v << ", group = " << group;
      }
}

TEST(Schedules, LayersOfAnyNumberAreInOrder) {
  for (int layers = 1; layers <= 8; ++layers)
    for (std::int64_t m = 1; m <= 64; ++m) {
      ScheduleShape shape = shape_of(1, m, layers);
      ListCheck check(shape, (layers - 1) * m + 1);
      ASSERT_EQ(check.run(layered(shape)), "") << layers << " layers, m = " << m;
    }
}

// ---- what others print ----

/// "F0 F1 B0 ...", of chunks from 1 on with a letter behind: "F0b".
std::string computed(const std::vector<Instruction>& list) {
  std::string text;
  for (const Instruction& i : list) {
    const char* name = i.op == Op::forward                                  ? "F"
                       : i.op == Op::backward || i.op == Op::backward_input ? "B"
                       : i.op == Op::weight_gradients                       ? "W"
                                                                            : nullptr;
    if (!name) continue;
    text += cat(text.empty() ? "" : " ", name, i.micro_batch);
    if (i.chunk > 0) text += static_cast<char>('a' + i.chunk);
  }
  return text;
}

ScheduleShape on(int stage, ScheduleShape shape) {
  shape.stage = stage;
  return shape;
}

TEST(Schedules, OrdersAreThoseOfThePapers) {
  EXPECT_EQ(computed(gpipe(on(1, shape_of(2, 3)))), "F0 F1 F2 B0 B1 B2");
  // Narayanan et al. 2021, figure 4, top: four stages, eight micro-batches.
  EXPECT_EQ(computed(one_forward_one_backward(on(0, shape_of(4, 8)))),
            "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
  EXPECT_EQ(computed(one_forward_one_backward(on(3, shape_of(4, 8)))),
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7");
  // The same, bottom: two chunks. Stage 4 begins to go back at once.
  EXPECT_EQ(
      computed(interleaved(on(3, shape_of(4, 8, 2)))),
      "F0 F1 F2 F3 F0b B0b F1b B1b F2b B2b F3b B3b F4 B0 F5 B1 F6 B2 F7 B3 F4b B4b F5b B5b F6b B6b F7b B7b "
      "B4 B5 B6 B7");
  // Qi et al. 2024, figure 3, top: weight gradients of the last stage wait longest.
  EXPECT_EQ(computed(zero_bubble(on(0, shape_of(4, 6)))),
            "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5");
  EXPECT_EQ(computed(zero_bubble(on(3, shape_of(4, 6)))),
            "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5");
}

/// Megatron-LM, core/pipeline_parallel/schedules.py: two stages, two chunks, five micro-batches in groups of
/// three.
TEST(Schedules, GroupsOfMicroBatchesPassChunkAfterChunk) {
  const std::string order = computed(interleaved(on(1, shape_of(2, 5, 2, 3))));
  std::string forwards;
  for (std::size_t at = order.find('F'); at != std::string::npos; at = order.find('F', at + 1))
    forwards += order.substr(at, order[at + 2] == 'b' ? 3 : 2) + " ";
  EXPECT_EQ(forwards, "F0 F1 F2 F0b F1b F2b F3 F4 F3b F4b ");
}

/// "ua" update_chunk, "ga" gather and "ra" release of chunk a; "F0a" and "B0a"; "L" share_loss, "S"
/// begin_update, "#" count, "R" reduce, "U" update.
std::string listed(const std::vector<Instruction>& list) {
  static const std::map<Op, std::string> names = {
      {Op::update_chunk, "u"}, {Op::gather, "g"},     {Op::release, "r"},      {Op::forward, "F"},
      {Op::backward, "B"},     {Op::share_loss, "L"}, {Op::begin_update, "S"}, {Op::count, "#"},
      {Op::reduce, "R"},       {Op::update, "U"}};
  std::string text;
  for (const Instruction& i : list)
    text += names.at(i.op) + (i.micro_batch < 0 ? "" : std::to_string(i.micro_batch)) +
            static_cast<char>('a' + i.chunk) + " ";
  return text;
}

TEST(Schedules, ParametersOfLayersComeTwicePerStepAChunkAhead) {
  ScheduleShape shape = shape_of(1, 2, 4);
  shape.early_update = shape.late_update = true;
  EXPECT_EQ(listed(layered(shape)),
            "ua ga F0a ub gb F1a ra F0b uc gc F1b rb F0c ud gd F1c F0d B0d F1d L1a S1a B1d rd gb B0c B1c rc "
            "ga B0b B1b rb B0a #0a B1a ra #1a R1a U1a ");
}

TEST(Schedules, AnUpdateHasHalfALayersTimeBeforeItIsWaitedFor) {
  ScheduleShape shape = shape_of(1, 4, 3);
  EXPECT_TRUE(listed(layered(shape)).starts_with("ga gb F0a F1a F2a F3a ra gc F0b F1b F2b F3b F0c "));
  shape.late_update = true;
  EXPECT_TRUE(
      listed(layered(shape)).starts_with("ua ga F0a F1a ub gb F2a F3a ra F0b F1b uc gc F2b F3b F0c "));
}

// ---- what cannot be ----

TEST(Schedules, ErrorsNameKeysAndValuesThatWouldDo) {
  expect_error(ErrorKind::config, "parallel.virtual_stages is 2", [] { gpipe(shape_of(4, 8, 2)); });
  expect_error(ErrorKind::config, "parallel.pipeline is 4", [] { layered(shape_of(4, 8, 2)); });
  expect_error(ErrorKind::config, "parallel.pipeline is 4", [] { accumulate(shape_of(4, 8)); });
  expect_error(ErrorKind::config, "set gradient_accumulation_steps to 4 or a multiple",
               [] { interleaved(shape_of(4, 3, 2)); });
  expect_error(ErrorKind::config, "set parallel.micro_batch_group to one of 4, 6, 7, 8",
               [] { interleaved(shape_of(4, 12, 2, 5)); });
  expect_error(ErrorKind::config, "set parallel.micro_batch_group to one of 6",
               [] { interleaved(shape_of(4, 6, 2)); });
  expect_error(ErrorKind::config, "gradient_accumulation_steps to a multiple of 5",
               [] { interleaved(shape_of(4, 12, 2, 5)); });
  EXPECT_FALSE(interleaved(shape_of(4, 15, 2, 5)).empty());
  expect_error(
      ErrorKind::config,
      "gradient_accumulation_steps = 6, which do not fill one: set parallel.micro_batch_group to one "
      "of 6, or gradient_accumulation_steps to a multiple of 8",
      [] { interleaved(shape_of(4, 6, 2, 8)); });
  expect_error(ErrorKind::config, "set gradient_accumulation_steps to 8 or a multiple",
               [] { interleaved(shape_of(4, 3, 2, 8)); });
  EXPECT_FALSE(interleaved(shape_of(4, 8, 2, 8)).empty());
  expect_error(ErrorKind::usage, "chosen", [] { make_schedule(Schedule::automatic, {}); });
}

}  // namespace
}  // namespace sherd::sharding
