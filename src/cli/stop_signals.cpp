#include "cli/stop_signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <mutex>

namespace sherd::cli {
namespace {

constexpr std::array<int, 3> stopping{SIGINT, SIGTERM, SIGHUP};

// Signals have no owner but the process: variables that belong to no object.
std::atomic<int> came{0};
std::atomic<const char*> told{""};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<const char*>::is_always_lock_free);

extern "C" void on_stop_signal(int signal) {
  const int error = errno;  // of whatever was interrupted
  came = signal;
  const char* message = told;
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message, std::strlen(message));
  std::signal(signal, SIG_DFL);
  errno = error;
}

std::mutex mutex;                                         // guards what follows
int living = 0;
std::array<struct sigaction, stopping.size()> before {};

}  // namespace

StopSignals::StopSignals(const char* message) {
  const std::lock_guard lock(mutex);
  if (living++ > 0) return;
  came = 0;
  told = message;
  for (std::size_t i = 0; i < stopping.size(); ++i) {
    ::sigaction(stopping[i], nullptr, &before[i]);
    if ((before[i].sa_flags & SA_SIGINFO) || before[i].sa_handler != SIG_IGN) std::signal(stopping[i], on_stop_signal);
  }
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(mutex);
  if (--living > 0) return;
  for (std::size_t i = 0; i < stopping.size(); ++i) ::sigaction(stopping[i], &before[i], nullptr);
}

int StopSignals::received() { return came.load(); }

}  // namespace sherd::cli
