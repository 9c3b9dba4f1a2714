#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sherd {
namespace {
std::atomic<LogLevel> minimum_level{LogLevel::info};
thread_local int thread_rank = -1;

/// On a terminal, wipes the line that a progress bar left the cursor on.
const char* line_start() {
  static const bool terminal = [] {
    const char* kind = std::getenv("TERM");
    return ::isatty(STDERR_FILENO) == 1 && kind && std::string_view(kind) != "dumb";
  }();
  return terminal ? "\r\x1b[K" : "";
}
}  // namespace

void set_log_level(LogLevel level) {
  minimum_level = level;
}

void log_line(LogLevel level, const std::string& message) {
  if (level < minimum_level.load(std::memory_order_relaxed)) return;
  const char* tag = level == LogLevel::warning ? "warning: " : level == LogLevel::error ? "error: " : "";
  const std::string rank = thread_rank < 0 ? "" : cat("[rank ", thread_rank, "] ");
  const std::string line = cat(line_start(), "sherd: ", rank, tag, message, "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);
}

ThreadRank::ThreadRank(int rank) : previous_(thread_rank) {
  thread_rank = rank;
}
ThreadRank::~ThreadRank() {
  thread_rank = previous_;
}
int ThreadRank::current() {
  return thread_rank;
}

}  // namespace sherd
