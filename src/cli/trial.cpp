#include "cli/trial.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "base/excerpt.h"
#include "base/files.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// posix_spawn's attributes and file actions, which are to be destroyed.
struct SpawnSettings {
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_t files;

  SpawnSettings() {
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_init(&files);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;
};

/// Starts the program as the first of a process group, with no signal blocked, whatever this thread blocks.
pid_t start(const std::vector<std::string>& words, const std::string& log) {
  SpawnSettings settings;
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&settings.attributes, &none);
  ::posix_spawnattr_setpgroup(&settings.attributes, 0);
  ::posix_spawnattr_setflags(&settings.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  ::posix_spawn_file_actions_addopen(&settings.files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&settings.files, STDOUT_FILENO, log.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0644);
  ::posix_spawn_file_actions_adddup2(&settings.files, STDOUT_FILENO, STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (const int error = ::posix_spawn(&child, arguments[0], &settings.files, &settings.attributes,
                                      arguments.data(), environ))
    fail(ErrorKind::io, "cannot start '", excerpt(words[0], 300), "' with its output in '", excerpt(log, 300),
         "': ", std::strerror(error));
  return child;
}

/// Waits until the process ends or `over` says that it need not be waited for. False: it has not ended.
bool wait_for(pid_t child, int& status, const std::function<bool()>& over) {
  constexpr std::chrono::milliseconds pause{20};
  for (;; std::this_thread::sleep_for(pause)) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return true;
    if (ended < 0 && errno != EINTR)
      fail(ErrorKind::io, "cannot wait for a program that was started: ", std::strerror(errno));
    if (over()) return false;
  }
}

/// Ends all of the group.
void end_group(pid_t child) {
  constexpr std::chrono::seconds patience{10};
  const auto begin = Clock::now();
  int status = 0;
  ::kill(-child, SIGTERM);
  const bool ended = wait_for(child, status, [&] { return Clock::now() - begin > patience; });
  ::kill(-child, SIGKILL);  // also what the first has left behind
  if (!ended) wait_for(child, status, [] { return false; });
}

/// The median of the steps that a metrics file has, but the first, which sets up what later ones use.
double median_step(const fs::path& metrics) {
  std::ifstream in(metrics);
  std::vector<double> seconds;
  for (std::string line; std::getline(in, line);) {
    const auto step = nlohmann::json::parse(line, nullptr, false);
    if (step.is_object() && step.contains("step_ms")) seconds.push_back(step["step_ms"].get<double>() / 1e3);
  }
  if (seconds.size() > 1) seconds.erase(seconds.begin());
  if (seconds.empty()) return 0;
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

/// The first error that a program's log tells of, without the program's name.
std::string first_error(const fs::path& log) {
  constexpr std::string_view mark = "error: ";
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);)
    if (const auto at = line.find(mark); at != std::string::npos) return line.substr(at + mark.size());
  return "";
}

std::string failure_of(const ProgramEnd& end, const Trial& trial, const fs::path& log) {
  switch (end.kind) {
    case ProgramEnd::Kind::too_long:
      return cat("took longer than ", engine::human_seconds(trial.most_seconds));
    case ProgramEnd::Kind::killed:
      return cat("was ended by signal ", end.code, end.code == SIGKILL ? ", perhaps for want of memory" : "",
                 " (", log.string(), ")");
    default:
      break;
  }
  if (end.code == 0) return "";
  const std::string error = first_error(log);
  return error.empty() ? cat("ended with exit code ", end.code, " (", log.string(), ")")
                       : excerpt(error, 300);
}

}  // namespace

ProgramEnd run_program_until(const std::string& launcher, const std::vector<std::string>& program,
                             const fs::path& log, double seconds, const std::function<bool()>& stopped) {
  std::vector<std::string> words = program;
  // The shell finds the launcher and takes its quotes apart; the program's words are passed as they are.
  if (!launcher.empty()) {
    words = {"/bin/sh", "-c", cat("exec ", launcher, " \"$@\""), "sh"};
    words.insert(words.end(), program.begin(), program.end());
  }
  const auto begin = Clock::now();
  const auto too_long = [&] { return std::chrono::duration<double>(Clock::now() - begin).count() > seconds; };
  const pid_t child = start(words, log.string());
  int status = 0;
  bool ended = false;
  try {
    ended = wait_for(child, status, [&] { return stopped() || too_long(); });
  } catch (...) {
    end_group(child);
    throw;
  }
  if (!ended) {
    end_group(child);
    return {too_long() ? ProgramEnd::Kind::too_long : ProgramEnd::Kind::stopped};
  }
  if (WIFSIGNALED(status)) return {ProgramEnd::Kind::killed, WTERMSIG(status)};
  return {ProgramEnd::Kind::exited, WEXITSTATUS(status)};
}

TrialResult run_trial(const Trial& trial, const std::function<bool()>& stopped) {
  const fs::path log = trial.folder / (trial.name + ".log"), metrics = trial.folder / (trial.name + ".jsonl");
  std::error_code ignored;
  fs::remove(metrics, ignored);
  std::vector<std::string> program{fs::read_symlink("/proc/self/exe").string(),
                                   "train",
                                   "--config",
                                   trial.config,
                                   "--metrics",
                                   metrics.string()};
  for (const std::string& override : trial.overrides) program.insert(program.end(), {"--set", override});
  if (trial.launcher.empty()) program.insert(program.end(), {"--ranks", std::to_string(trial.ranks)});
  const ProgramEnd end = run_program_until(trial.launcher, program, log, trial.most_seconds, stopped);
  if (end.kind == ProgramEnd::Kind::stopped) fail(ErrorKind::interrupted, "stopped");
  TrialResult out{.failure = failure_of(end, trial, log)};
  if (!out.failure.empty()) return out;
  out.step_seconds = median_step(metrics);
  if (out.step_seconds <= 0) out.failure = cat("made no steps (", log.string(), ")");
  return out;
}

}  // namespace sherd::cli
