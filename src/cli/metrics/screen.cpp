#include "cli/metrics/screen.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>

#include "base/error.h"
#include "base/terminal.h"

namespace sherd::cli {
namespace {

// SIGTSTP and SIGTTOU keep what they do: Ctrl-Z is a key like any other here.
constexpr std::array ending{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1};

std::atomic<int> came{0};
static_assert(std::atomic<int>::is_always_lock_free);

std::array<struct sigaction, ending.size()> handlers_before;

int number_in(const char* variable, int fallback) {
  const char* text = std::getenv(variable);
  const int value = text ? std::atoi(text) : 0;
  return value > 0 ? value : fallback;
}

}  // namespace

ScreenSize screen_size(int descriptor) {
  constexpr int widest = 1000, highest = 500;
  struct winsize size {};
  const bool known = ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0;
  const ScreenSize out = known ? ScreenSize{size.ws_col, size.ws_row}
                               : ScreenSize{number_in("COLUMNS", 80), number_in("LINES", 24)};
  return {std::min(out.width, widest), std::min(out.height, highest)};
}

Screen::Screen() {
  if (!is_terminal(STDOUT_FILENO))
    fail(ErrorKind::usage,
         "standard output is no terminal in which pictures can be redrawn: give --once for a plain one");
  came = 0;
  for (std::size_t i = 0; i < ending.size(); ++i) {
    ::sigaction(ending[i], nullptr, &handlers_before[i]);
    if (handlers_before[i].sa_handler == SIG_IGN) continue;  // as nohup asks
    struct sigaction action {};
    action.sa_handler = [](int signal) { came = signal; };
    ::sigaction(ending[i], &action, nullptr);
  }
  has_keys_ = ::tcgetattr(STDIN_FILENO, &before_) == 0;
  if (has_keys_) {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | ISIG | IEXTEN);
    raw.c_cc[VMIN] = 1, raw.c_cc[VTIME] = 0;
    ::tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  }
  write_terminal(STDOUT_FILENO, "\x1b[?1049h\x1b[?25l");
}

Screen::~Screen() {
  write_terminal(STDOUT_FILENO, "\x1b[0m\x1b[?25h\x1b[?1049l");
  if (has_keys_) ::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  for (std::size_t i = 0; i < ending.size(); ++i) ::sigaction(ending[i], &handlers_before[i], nullptr);
}

void Screen::show(const std::vector<std::string>& lines) const {
  std::string out = "\x1b[H";
  for (std::size_t i = 0; i < lines.size(); ++i) out += (i > 0 ? "\r\n" : "") + lines[i] + "\x1b[K";
  write_terminal(STDOUT_FILENO, out + "\x1b[J");
}

char Screen::key(int milliseconds) const {
  pollfd input{has_keys_ ? STDIN_FILENO : -1, POLLIN, 0};
  if (signal() != 0 || ::poll(&input, 1, milliseconds) <= 0) return 0;
  char got = 0;
  return ::read(STDIN_FILENO, &got, 1) == 1 ? got : '\x03';
}

int Screen::signal() {
  return came;
}

}  // namespace sherd::cli
