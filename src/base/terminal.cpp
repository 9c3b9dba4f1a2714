#include "base/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace sherd {
namespace {

constexpr std::array ending_signals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGQUIT};

/// The terminal that shows a status line, or -1; signal handlers read it.
std::atomic<int> shown_on{-1};
std::atomic<bool> progress_shown{true};
static_assert(std::atomic<int>::is_always_lock_free);

constexpr char hide_cursor[] = "\x1b[?25l", show_cursor[] = "\x1b[?25h", wipe[] = "\r\x1b[K\x1b[?25h";

extern "C" void on_ending_signal(int signal) {
  end_by_signal(signal);
}

/// From now on signals that nobody handles wipe the line of `terminal` before they end the program.
void take_signals(int terminal) {
  shown_on = terminal;
  for (const int signal : ending_signals) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL)
      continue;
    now.sa_handler = on_ending_signal, now.sa_flags |= SA_ONSTACK;
    ::sigaction(signal, &now, nullptr);
  }
}

/// Signals are again as they were.
void give_signals_back() {
  shown_on = -1;
  for (const int signal : ending_signals) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO)) continue;
    if (now.sa_handler == on_ending_signal) std::signal(signal, SIG_DFL);  // not one set since
  }
}

}  // namespace

bool is_terminal(int descriptor) {
  const char* kind = std::getenv("TERM");
  return ::isatty(descriptor) == 1 && kind && std::strcmp(kind, "dumb") != 0;
}

bool shows_colours(int descriptor) {
  const char* refused = std::getenv("NO_COLOR");
  return is_terminal(descriptor) && !(refused && *refused);
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (const char* value = std::getenv(name); value && *value)
      return ::strcasestr(value, "utf-8") || ::strcasestr(value, "utf8");
  return false;
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

bool set_shows_progress(bool shown) {
  return progress_shown.exchange(shown);
}
bool shows_progress() {
  return progress_shown;
}

StatusLine::StatusLine(int descriptor)
    : descriptor_(descriptor), active_(is_terminal(descriptor) && shows_progress()) {}

void StatusLine::show(const std::function<std::string(int columns)>& text) {
  const auto now = std::chrono::steady_clock::now();
  if (!active_ || (shown_ && now - last_ < std::chrono::milliseconds(100))) return;
  last_ = now;
  draw(text);
}

void StatusLine::show(std::string text) {
  show([&](int columns) { return text.substr(0, static_cast<std::size_t>(columns)); });
}

void StatusLine::draw(const std::function<std::string(int columns)>& text) {
  std::string all;
  if (!shown_) take_signals(descriptor_), all = hide_cursor;
  // One column less than there are: a full line makes some terminals wrap.
  all += clear_line + text(std::max(1, terminal_width(descriptor_) - 1));
  write_terminal(descriptor_, all);
  shown_ = true;
}

void StatusLine::leave(const std::function<std::string(int columns)>& text) {
  if (!shown_) return;
  draw(text);
  write_terminal(descriptor_, cat("\n", show_cursor));
  give_signals_back();
  shown_ = false;
}

void StatusLine::clear() {
  if (!shown_) return;
  write_terminal(descriptor_, wipe);
  give_signals_back();
  shown_ = false;
}

void wipe_status_line() {
  const int terminal = shown_on.load();
  if (terminal >= 0) [[maybe_unused]]
    const ssize_t ignored = ::write(terminal, clear_line, std::strlen(clear_line));
}

void end_by_signal(int signal) {
  const int terminal = shown_on.load();
  if (terminal >= 0) [[maybe_unused]]
    const ssize_t ignored = ::write(terminal, wipe, sizeof wipe - 1);
  std::signal(signal, SIG_DFL);
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);  // a handler's own signal is blocked, and a waiting thread's
  std::raise(signal);
}

}  // namespace sherd
