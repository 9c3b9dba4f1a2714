#include "engine/report/terminal_cursor.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>

namespace sherd::engine {
namespace {

constexpr std::array ending_signals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGQUIT};

/// The terminal whose cursor is hidden, or -1; signal handlers read it.
std::atomic<int> hidden_on{-1};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void on_ending_signal(int signal) {
  end_by_signal(signal);
}

}  // namespace

std::string hide_cursor(int terminal) {
  hidden_on = terminal;
  for (const int signal : ending_signals) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL)
      continue;
    now.sa_handler = on_ending_signal, now.sa_flags |= SA_ONSTACK;
    ::sigaction(signal, &now, nullptr);
  }
  return "\x1b[?25l";
}

std::string show_cursor() {
  hidden_on = -1;
  for (const int signal : ending_signals) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO)) continue;
    if (now.sa_handler == on_ending_signal) std::signal(signal, SIG_DFL);  // not one set since
  }
  return "\x1b[?25h";
}

void end_by_signal(int signal) {
  const int terminal = hidden_on.load();
  if (terminal >= 0) [[maybe_unused]]
    const ssize_t ignored = ::write(terminal, "\x1b[?25h\n", 7);
  std::signal(signal, SIG_DFL);
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);  // a handler's own signal is blocked, and a waiting thread's
  std::raise(signal);
}

}  // namespace sherd::engine
