#include "comm/exchange/waiting.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <thread>

#include "base/deadline.h"

namespace sherd::comm {
namespace {

/// Beside one who works on the same core: it is left to him for a while, and tried again later.
TEST(Backoff, SleepWhereYieldsTakeLong) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &before)) {
      CPU_SET(core, &one);
      break;
    }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  std::atomic<bool> over{false};
  std::thread worker([&] {
    while (!over) {
    }
  });
  Backoff turns;
  const Deadline limit = Deadline::after_seconds(60);
  while (turns.yield() && !limit.passed()) {
  }
  int sleeps = 1;
  while (!turns.yield()) ++sleeps;
  over = true;
  worker.join();
  EXPECT_FALSE(limit.passed()) << "it always yielded";
  EXPECT_EQ(sleeps, 1000);
  EXPECT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace sherd::comm
