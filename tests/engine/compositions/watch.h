#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>

/// Names the composition that ends the process, and ends one that nothing else would end.
namespace sherd::test {

inline std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* asked = std::getenv(name);
  return asked ? std::strtoull(asked, nullptr, 10) : otherwise;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t usual_seconds = 60;
#else
constexpr std::uint64_t usual_seconds = 5;
#endif

/// The deadline of every wait for other ranks.
inline double deadline_seconds() {
  return static_cast<double>(from_environment("SHERD_FUZZ_SECONDS", usual_seconds));
}

/// Ends the process, naming the composition, where a run is stuck in other than a wait for ranks.
class Watch {
 public:
  explicit Watch(const std::string& what)
      : thread_([this, what](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          const auto limit = std::chrono::duration<double>(4 * deadline_seconds());
          if (ended_.wait_for(lock, stop, limit, [] { return false; }) || stop.stop_requested()) return;
          std::fprintf(stderr, "no end after %g seconds, and no wait for ranks that ran out of time: %s",
                       limit.count(), what.c_str());
          std::_Exit(1);
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::jthread thread_;
};

/// Writes down which composition was under way where a signal ends the process, and leaves the rest to whom
/// it came to before.
class LastWords {
 public:
  explicit LastWords(const std::string& what) : text_("under way: " + what) {
    said_ = text_.c_str();
    struct sigaction action {};
    action.sa_handler = say, action.sa_flags = SA_ONSTACK;
    for (std::size_t i = 0; i < std::size(signals); ++i) sigaction(signals[i], &action, &before_[i]);
  }
  ~LastWords() { restore(); }
  LastWords(const LastWords&) = delete;
  LastWords& operator=(const LastWords&) = delete;

 private:
  static constexpr int signals[] = {SIGSEGV, SIGABRT, SIGFPE, SIGBUS};
  static void restore() {
    for (std::size_t i = 0; i < std::size(signals); ++i) sigaction(signals[i], &before_[i], nullptr);
  }
  /// The instruction that it returns to fails again.
  static void say(int) {
    restore();
    [[maybe_unused]] const auto written = write(STDERR_FILENO, said_, std::strlen(said_));
  }

  static inline const char* said_ = "";
  static inline struct sigaction before_[std::size(signals)]{};
  std::string text_;
};

}  // namespace sherd::test
