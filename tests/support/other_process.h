#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <stdexcept>

namespace sherd::testing {

/// Another process, which holds what `make` returns until it is killed.
class OtherProcess {
 public:
  /// Returns when it holds it. Throws std::runtime_error where it cannot; it says why on stderr.
  template <class Make>
  explicit OtherProcess(const Make& make) {
    int ready[2];
    if (::pipe(ready) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ == 0) hold(make, ready[1]);
    ::close(ready[1]);
    char byte;
    const bool told = ::read(ready[0], &byte, 1) == 1;
    ::close(ready[0]);
    if (told) return;
    kill();
    throw std::runtime_error("the other process ended before it was ready");
  }
  ~OtherProcess() { kill(); }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  pid_t pid() const { return pid_; }
  /// Returns when it has ended; nothing where it has before.
  void kill() {
    if (ended_) return;
    ended_ = true;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  template <class Make>
  [[noreturn]] static void hold(const Make& make, int ready) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it must not outlive a test that crashed
    try {
      [[maybe_unused]] const auto held = make();
      while (::write(ready, "x", 1) == 1) ::pause();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "other process: %s\n", error.what());
    }
    ::_exit(1);
  }

  pid_t pid_ = -1;
  bool ended_ = false;
};

}  // namespace sherd::testing
