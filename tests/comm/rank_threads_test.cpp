#include <gtest/gtest.h>

#include <thread>

#include "comm/communicator.h"
#include "support/borrowed_stack.h"

namespace sherd::comm {
namespace {

/// Functions of a caller may be interrupted there by any signal.
TEST(RankThreads, HaveAlternateStacks) {
  using sherd::testing::BorrowedStack;
  if (!BorrowedStack::possible) GTEST_SKIP() << "for x86 alone";
  const sherd::testing::IdleHandler handler(SIGPROF, SA_ONSTACK | SA_RESTART);
  BorrowedStack stacks[2];
  std::thread run(
      [&] { run_local(2, CommOptions{}, [&](Communicator& comm) { stacks[comm.rank()].spin(); }); });
  for (BorrowedStack& stack : stacks) {
    while (!stack.on()) std::this_thread::yield();
    stack.bombard(SIGPROF, 20);
  }
  for (BorrowedStack& stack : stacks) stack.stop();
  run.join();
  for (const BorrowedStack& stack : stacks) EXPECT_TRUE(stack.untouched());
}

}  // namespace
}  // namespace sherd::comm
