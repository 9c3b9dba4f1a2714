#include "engine/report/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

namespace sherd::engine {

bool is_terminal(int descriptor) {
  const char* kind = std::getenv("TERM");
  return ::isatty(descriptor) == 1 && kind && std::strcmp(kind, "dumb") != 0;
}

int terminal_width(int descriptor) {
  struct winsize size {};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

void write_terminal(int descriptor, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(descriptor, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    done += static_cast<std::size_t>(wrote);
  }
}

StatusLine::StatusLine(int descriptor) : descriptor_(descriptor), terminal_(is_terminal(descriptor)) {}

void StatusLine::show(std::string text) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || (shown_ && now - last_ < std::chrono::milliseconds(100))) return;
  text.resize(std::min(text.size(), static_cast<std::size_t>(std::max(1, terminal_width(descriptor_) - 1))));
  write_terminal(descriptor_, "\r\x1b[K" + text);
  shown_ = true, last_ = now;
}

void StatusLine::clear() {
  if (shown_) write_terminal(descriptor_, "\r\x1b[K");
  shown_ = false;
}

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
