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

}  // namespace sherd::comm
