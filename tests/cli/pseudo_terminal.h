#pragma once

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace sherd::testing {

/// A program at a terminal of its own: what it shows, and what is typed there. It ends with the object.
class PseudoTerminal {
 public:
  /// Runs a line of shell.
  explicit PseudoTerminal(const std::string& line, int width = 80, int height = 24) {
    winsize size{};
    size.ws_col = static_cast<unsigned short>(width), size.ws_row = static_cast<unsigned short>(height);
    child_ = ::forkpty(&master_, nullptr, nullptr, &size);
    if (child_ < 0) throw std::runtime_error("no pseudo-terminal");
    if (child_ == 0) {
      ::setenv("TERM", "xterm", 1);
      ::execl("/bin/sh", "sh", "-c", ("exec " + line).c_str(), nullptr);
      ::_exit(127);
    }
    ::tcgetattr(master_, &before_);
  }
  ~PseudoTerminal() {
    if (child_ > 0) ::kill(child_, SIGKILL), ::waitpid(child_, nullptr, 0);
    ::close(master_);
  }
  PseudoTerminal(const PseudoTerminal&) = delete;
  PseudoTerminal& operator=(const PseudoTerminal&) = delete;

  void type(const std::string& text) const {
    if (::write(master_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw std::runtime_error("the terminal takes no input");
  }
  void resize(int width, int height) const {
    winsize size{};
    size.ws_col = static_cast<unsigned short>(width), size.ws_row = static_cast<unsigned short>(height);
    ::ioctl(master_, TIOCSWINSZ, &size);
  }
  void send(int signal) const { ::kill(child_, signal); }

  /// Whether the program shows `text` within some seconds, in what it writes from now on or has written and
  /// nobody has looked at. What stands before it has been looked at then.
  bool shows(const std::string& text, double seconds = 20) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      if (const auto at = shown_.find(text, looked_at_); at != std::string::npos)
        return looked_at_ = at + text.size(), true;
      if (!read_some() || std::chrono::steady_clock::now() > limit) return false;
    }
  }
  /// Waits for the program's end and gives its exit code, or minus the signal that ended it.
  int end(double seconds = 20) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    int status = 0;
    while (::waitpid(child_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > limit)
        throw std::runtime_error("the program does not end: " + shown_);
      read_some();
    }
    child_ = -1;
    while (read_some()) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  /// All that was shown.
  const std::string& shown() const { return shown_; }
  /// Whether lines are edited and echoed, and keys make signals, as when the program began.
  bool is_as_before() const {
    termios now{};
    ::tcgetattr(master_, &now);
    return now.c_lflag == before_.c_lflag && now.c_iflag == before_.c_iflag && now.c_oflag == before_.c_oflag;
  }

 private:
  /// Takes what the program has written, or waits a little for it. False where nothing comes any more.
  bool read_some() {
    pollfd one{master_, POLLIN, 0};
    if (::poll(&one, 1, 20) <= 0) return child_ > 0;
    char part[4096];
    const ssize_t got = ::read(master_, part, sizeof part);
    if (got > 0) shown_.append(part, static_cast<std::size_t>(got));
    if (got <= 0) ::usleep(5000);
    return got > 0;
  }

  int master_ = -1;
  pid_t child_ = -1;
  termios before_{};
  std::string shown_;
  std::size_t looked_at_ = 0;
};

}  // namespace sherd::testing
