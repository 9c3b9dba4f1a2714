#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>

namespace sherd::cli {

/// A process that ends a process group once this process has ended, in whatever way: it sees the end of a
/// pipe whose other end this process alone holds. It has a group of its own, so that signals to this
/// process's group spare it. It ends with the handle; until then the number of the group that it watches must
/// not be given to another.
class Watchdog {
 public:
  explicit Watchdog(pid_t group) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return;
    process_ = ::fork();
    if (process_ == 0) watch(group, ends);
    ::close(ends[0]);
    here_ = ends[1];
  }
  ~Watchdog() {
    if (process_ > 0) ::kill(process_, SIGKILL);
    if (here_ >= 0) ::close(here_);
    while (process_ > 0 && ::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  /// System calls alone: locks of other threads may be taken in a child.
  [[noreturn]] static void watch(pid_t group, const int (&ends)[2]) {
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, nullptr);
    ::setpgid(0, 0);
    ::dup2(ends[0], STDIN_FILENO);
    ::close_range(1, ~0U, 0);  // the other end, and whatever else would stay open as long
    char byte;
    while (::read(STDIN_FILENO, &byte, 1) < 0 && errno == EINTR) {
    }
    ::kill(-group, SIGTERM);
    const timespec patience{10, 0};
    ::nanosleep(&patience, nullptr);
    ::kill(-group, SIGKILL);
    ::_exit(0);
  }

  pid_t process_ = -1;
  int here_ = -1;
};

}  // namespace sherd::cli
