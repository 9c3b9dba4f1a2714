#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace sherd::comm {

/// A word of shared memory to sleep on (a futex). Waking costs no system call while nobody sleeps.
struct WaitWord {
  std::atomic<std::uint32_t> count{0}, sleepers{0};

  void wake_all() noexcept;
  /// Sleeps unless the count is not `seen` any more; at most `longest`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest);
};

/// Tells the processor that this is a spin loop.
void spin_pause() noexcept;

/// How a thread that waits for others gives them its core between two looks. A yield costs next to nothing
/// where they give it back soon. Where somebody works meanwhile, it costs all of that turn, and with
/// schedulers that then count the rest of the thread's own turn as used (as newer Linux) turns to come; a
/// thread that sleeps is woken at once. Thread-safe.
class Backoff {
 public:
  /// Yields and returns true, or returns false: it is better to sleep now. So it says some times after a
  /// yield that took long.
  bool yield() noexcept;

 private:
  std::atomic<int> sleeps_{0};  ///< before the next try
};

}  // namespace sherd::comm
