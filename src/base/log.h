#pragma once

#include <string>

#include "base/error.h"

namespace sherd {

enum class LogLevel { debug, info, warning, error };

/// Lines below `level` are dropped. Process-wide, as stderr is; default info. Returns the level before.
LogLevel set_log_level(LogLevel level);
/// Whether lines of `level` are kept.
bool logs(LogLevel level);

/// Writes one whole line to stderr: "sherd: message", with "[rank r] " in front when the calling thread has a
/// rank (ThreadRank). On a terminal it wipes a status line first, and "error:" and "warning:" have colours
/// (shows_colours()). Safe from any thread.
void log_line(LogLevel level, const std::string& message);

template <class... Args>
void log_debug(const Args&... args) {
  log_line(LogLevel::debug, cat(args...));
}
template <class... Args>
void log_info(const Args&... args) {
  log_line(LogLevel::info, cat(args...));
}
template <class... Args>
void log_warning(const Args&... args) {
  log_line(LogLevel::warning, cat(args...));
}

/// Names the calling thread's rank in log lines while it lives.
class ThreadRank {
 public:
  explicit ThreadRank(int rank);
  ~ThreadRank();
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;
  /// The calling thread's rank, or -1.
  static int current();

 private:
  int previous_;
};

}  // namespace sherd
