#include "comm/exchange/backoff.h"

#include <sched.h>

#include <chrono>

namespace sherd::comm {
namespace {

constexpr auto long_turn = std::chrono::milliseconds(1);
constexpr int sleeps_after = 1000;

}  // namespace

bool Backoff::yield() noexcept {
  using Clock = std::chrono::steady_clock;
  const int sleeps = sleeps_.load(std::memory_order_relaxed);
  if (sleeps > 0) {
    sleeps_.store(sleeps - 1, std::memory_order_relaxed);
    return false;
  }
  const auto start = Clock::now();
  sched_yield();
  if (Clock::now() - start > long_turn) sleeps_.store(sleeps_after, std::memory_order_relaxed);
  return true;
}

}  // namespace sherd::comm
