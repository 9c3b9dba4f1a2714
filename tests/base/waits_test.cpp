#include "base/waits.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace sherd {
namespace {

void wait_for_a_while() {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

TEST(Waits, CountByKindAndThread) {
  const WaitTotals before = waited_so_far();
  std::thread other([] {
    const WaitScope scope(WaitFor::ranks);
    wait_for_a_while();
    EXPECT_EQ(waited_so_far().ranks, 0) << "counted as it ends";
  });
  other.join();
  {
    const WaitScope scope(WaitFor::storage);
    wait_for_a_while();
  }
  wait_for_a_while();
  {
    const WaitScope scope(WaitFor::data);
    wait_for_a_while();
  }
  const WaitTotals waits = waited_so_far() - before;
  EXPECT_EQ(waits.ranks, 0) << "another thread's";
  EXPECT_GE(waits.storage, 0.005);
  EXPECT_GE(waits.data, 0.005);
  EXPECT_LT(waits.total(), 0.5);
}

TEST(Waits, InsideOfOneAnotherCountOnce) {
  const WaitTotals before = waited_so_far();
  const auto begin = std::chrono::steady_clock::now();
  {
    const WaitScope outer(WaitFor::ranks);
    {
      const WaitScope inner(WaitFor::storage);
      wait_for_a_while();
    }
    {
      const WaitScope inner(WaitFor::ranks);
      wait_for_a_while();
    }
    wait_for_a_while();
  }
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const WaitTotals waits = waited_so_far() - before;
  EXPECT_EQ(waits.storage, 0);
  EXPECT_GE(waits.ranks, 0.015);
  EXPECT_LE(waits.ranks, passed);
}

}  // namespace
}  // namespace sherd
