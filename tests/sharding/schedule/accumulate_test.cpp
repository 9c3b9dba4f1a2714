// Lists of instructions: what has to come before what.
#include "sharding/instruction.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sherd::sharding {
namespace {

using Op = Instruction::Op;

std::vector<Op> ops_of(const std::vector<Instruction>& list) {
  std::vector<Op> ops;
  for (const Instruction& instruction : list) ops.push_back(instruction.op);
  return ops;
}

TEST(Accumulate, AStepIsForwardAndBackwardOfEachMicroBatchAndOneUpdate) {
  EXPECT_EQ(ops_of(accumulate(0, false, false)),
            (std::vector{Op::forward, Op::backward, Op::reduce, Op::count}));
  EXPECT_EQ(accumulate(0, false, true), accumulate(0, false, false))
      << "nothing is updated before the last one";
  EXPECT_EQ(ops_of(accumulate(2, true, false)),
            (std::vector{Op::forward, Op::share_loss, Op::backward, Op::reduce, Op::count, Op::update}));
  EXPECT_EQ(ops_of(accumulate(2, true, true)), (std::vector{Op::forward, Op::share_loss, Op::begin_update,
                                                            Op::backward, Op::reduce, Op::count, Op::update}))
      << "no weight changes before all ranks know the loss";
  for (const Instruction& instruction : accumulate(2, true, true)) EXPECT_EQ(instruction.micro_batch, 2);
}

}  // namespace
}  // namespace sherd::sharding
