#include "engine/report/status_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

}  // namespace sherd::engine
