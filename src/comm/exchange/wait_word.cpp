#include "comm/exchange/wait_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

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

}  // namespace sherd::comm
