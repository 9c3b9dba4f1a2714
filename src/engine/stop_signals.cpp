#include "engine/stop_signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>

namespace sherd::engine {
namespace {

constexpr std::array<int, 3> stopping{SIGINT, SIGTERM, SIGHUP};

// Signals have no owner but the process: variables that belong to no object.
std::atomic<int> came{0};
std::atomic<const char*> told{""};
std::array<std::atomic<std::int64_t>, stopping.size()> first_came{};  // by kind, in milliseconds; 0: not yet
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<const char*>::is_always_lock_free &&
              std::atomic<std::int64_t>::is_always_lock_free);

/// A terminal and a launcher may both deliver what was asked for once.
constexpr std::int64_t one_request_ms = 1000;

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // which signal handlers may call, unlike std::chrono's by its word
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000 + 1;
}

extern "C" void on_stop_signal(int signal) {
  const int error = errno;  // of whatever was interrupted
  std::size_t kind = 0;
  while (stopping[kind] != signal) ++kind;
  const std::int64_t now = now_ms(), first = first_came[kind];
  if (first == 0) {
    first_came[kind] = now;
    came = signal;
    const char* message = told;
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message, std::strlen(message));
  } else if (now - first >= one_request_ms) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  errno = error;
}

std::mutex mutex;  // guards what follows
int living = 0;
std::array<struct sigaction, stopping.size()> before{};

}  // namespace

StopSignals::StopSignals(const char* message) {
  const std::lock_guard lock(mutex);
  if (living++ > 0) return;
  came = 0;
  for (auto& first : first_came) first = 0;
  told = message;
  for (std::size_t i = 0; i < stopping.size(); ++i) {
    ::sigaction(stopping[i], nullptr, &before[i]);
    if ((before[i].sa_flags & SA_SIGINFO) || before[i].sa_handler != SIG_IGN)
      std::signal(stopping[i], on_stop_signal);
  }
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(mutex);
  if (--living > 0) return;
  for (std::size_t i = 0; i < stopping.size(); ++i) ::sigaction(stopping[i], &before[i], nullptr);
}

int StopSignals::received() {
  return came.load();
}

}  // namespace sherd::engine
