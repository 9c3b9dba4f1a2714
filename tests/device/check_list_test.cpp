#include "device/check_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sherd::device {
namespace {

TEST(CheckList, CallsWhatIsThereInItsOrder) {
  CheckList list;
  std::vector<int> called;
  const auto one = list.add([&] { called.push_back(1); });
  auto two = list.add([&] { called.push_back(2); });
  const auto three = list.add([&] { called.push_back(3); });
  list.call();
  two.reset();
  list.call();
  EXPECT_EQ(called, (std::vector<int>{1, 2, 3, 1, 3}));
  const auto bad = list.add([] { throw std::runtime_error("found"); });
  EXPECT_THROW(list.call(), std::runtime_error);
}

/// As threads that exchange do, while the rank's thread waits for the device.
TEST(CheckList, ThreadsAddAndRemoveWhileAnotherCalls) {
  CheckList list;
  std::atomic<bool> enough = false;
  std::thread caller([&] {
    while (!enough) list.call();
  });
  for (int i = 0; i < 300; ++i) {
    auto alive = std::make_unique<std::atomic<int>>(0);  // of whose end the check must not hear
    const auto check = list.add([&at = *alive] { ++at; });
    while (alive->load() == 0) std::this_thread::yield();
  }
  enough = true;
  caller.join();
}

TEST(CheckList, AHandleGoesWhenItsCallHasEnded) {
  CheckList list;
  std::atomic<bool> begun = false, ended = false;
  auto check = list.add([&] {
    begun = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ended = true;
  });
  std::thread caller([&] { list.call(); });
  while (!begun) std::this_thread::yield();
  check.reset();
  EXPECT_TRUE(ended);
  caller.join();
}

}  // namespace
}  // namespace sherd::device
