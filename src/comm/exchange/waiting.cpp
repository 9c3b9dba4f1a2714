#include "comm/exchange/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace sherd::comm {

void WaitWord::wake_all() noexcept {
  count.fetch_add(1);
  if (sleepers.load() > 0) syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void WaitWord::sleep(std::uint32_t seen, std::chrono::nanoseconds longest) {
  const timespec time{static_cast<time_t>(longest.count() / 1'000'000'000),
                      static_cast<long>(longest.count() % 1'000'000'000)};
  sleepers.fetch_add(1);
  syscall(SYS_futex, &count, FUTEX_WAIT, seen, &time, nullptr, 0);
  sleepers.fetch_sub(1);
}

void spin_pause() noexcept {
#if defined(__SSE2__)
  _mm_pause();
#endif
}

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
