#pragma once

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <vector>

namespace sherd::testing {

/// A thread's stack pointer at the end of a piece of heap, as some libraries' products have it while they
/// run: what a signal writes below it lands in the heap.
class BorrowedStack {
 public:
  /// False where no such thing is written for the processor.
  static constexpr bool possible =
#if defined(__x86_64__)
      true;
#else
      false;
#endif

  /// Runs on it until stop(). The thread is there once this->on() is true.
  void spin() {
#if defined(__x86_64__)
    thread_ = ::pthread_self();
    on_ = true;
    asm volatile(
        "movq %%rsp, %%r12\n\t"
        "movq %[top], %%rsp\n"
        "1:\n\t"
        "pause\n\t"
        "cmpb $0, (%[stop])\n\t"
        "je 1b\n\t"
        "movq %%r12, %%rsp"
        :
        : [top] "r"(memory_.data() + memory_.size()), [stop] "r"(&stop_)
        : "r12", "cc", "memory");
#endif
  }
  bool on() const {
    return on_;
  }
  void stop() {
    stop_ = true;
  }
  /// Sends the thread a signal `times` times, a fifth of a millisecond apart.
  void bombard(int signal, int times) const {
    for (int i = 0; i < times; ++i) {
      ::pthread_kill(thread_, signal);
      ::usleep(200);
    }
  }
  bool untouched() const {
    return std::all_of(memory_.begin(), memory_.end(), [](std::byte b) { return b == pattern; });
  }

 private:
  static constexpr std::byte pattern{0xa5};
  std::vector<std::byte> memory_ = std::vector<std::byte>(256 << 10, pattern);
  pthread_t thread_{};
  std::atomic<bool> on_ = false, stop_ = false;
};

/// `signal` with a handler that does nothing, installed with `flags`, while it lives.
class IdleHandler {
 public:
  IdleHandler(int signal, int flags) : signal_(signal) {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = flags;
    ::sigaction(signal, &action, &before_);
  }
  ~IdleHandler() { ::sigaction(signal_, &before_, nullptr); }
  IdleHandler(const IdleHandler&) = delete;
  IdleHandler& operator=(const IdleHandler&) = delete;

 private:
  int signal_;
  struct sigaction before_ {};
};

}  // namespace sherd::testing
