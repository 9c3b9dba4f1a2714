#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace sherd::testing {

/// A process and all that it started, as far as they live.
inline std::vector<pid_t> processes_below(pid_t process) {
  std::vector<pid_t> out{process};
  std::error_code gone;
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", gone)) {
    std::ifstream children(thread.path() / "children");
    for (pid_t child = 0; children >> child;) {
      const std::vector<pid_t> below = processes_below(child);
      out.insert(out.end(), below.begin(), below.end());
    }
  }
  return out;
}

/// Bytes that a process holds for itself: its anonymous memory and its share of what it shares. Without pages
/// of files, such as programs, which the system takes back when it needs memory. 0 unless it runs `program`.
inline std::uint64_t resident_bytes(pid_t process, const std::filesystem::path& program) {
  const std::filesystem::path folder = "/proc/" + std::to_string(process);
  std::error_code gone;
  if (std::filesystem::read_symlink(folder / "exe", gone) != program) return 0;
  std::ifstream in(folder / "smaps_rollup");
  std::uint64_t sum = 0;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:"))
      sum += std::stoull(line.substr(line.find(':') + 1)) * 1024;
  return sum;
}

/// Waits for a child of this process; returns its status, and in `most` the largest sum of what it and those
/// below it that run `program` held at one time.
inline int wait_and_weigh(pid_t child, const std::filesystem::path& program, std::uint64_t& most) {
  const std::filesystem::path exact = std::filesystem::canonical(program);
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    std::uint64_t sum = 0;
    for (const pid_t process : processes_below(child)) sum += resident_bytes(process, exact);
    most = std::max(most, sum);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return status;
}

}  // namespace sherd::testing
