#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "base/terminal.h"

namespace sherd {
namespace {
std::atomic<LogLevel> minimum_level{LogLevel::info};
thread_local int thread_rank = -1;

std::string tag_of(LogLevel level) {
  if (level < LogLevel::warning) return "";
  const bool error = level == LogLevel::error, coloured = shows_colours(STDERR_FILENO);
  return cat(coloured ? (error ? red : yellow) : "", error ? "error:" : "warning:", coloured ? plain : "",
             " ");
}
}  // namespace

LogLevel set_log_level(LogLevel level) {
  return minimum_level.exchange(level);
}

bool logs(LogLevel level) {
  return level >= minimum_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& message) {
  if (!logs(level)) return;
  const std::string rank = thread_rank < 0 ? "" : cat("[rank ", thread_rank, "] ");
  const std::string line =
      cat(is_terminal(STDERR_FILENO) ? clear_line : "", "sherd: ", rank, tag_of(level), message, "\n");
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
