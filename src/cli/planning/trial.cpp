#include "cli/planning/trial.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/launch/watchdog.h"
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

/// Waits until the process has ended or `over` says that it need not be waited for. It is not reaped yet, so
/// that its number, which is its group's, belongs to nobody else. False: it has not ended.
bool wait_for(pid_t child, const std::function<bool()>& over) {
  constexpr std::chrono::milliseconds pause{20};
  for (;; std::this_thread::sleep_for(pause)) {
    siginfo_t ended{};
    if (::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOHANG | WNOWAIT) == 0) {
      if (ended.si_pid == child) return true;
    } else if (errno != EINTR) {
      fail(ErrorKind::io, "cannot wait for a trial: ", std::strerror(errno),
           ". Let whoever starts sherd not ignore SIGCHLD");
    }
    if (over()) return false;
  }
}

/// A program that was started, with all that it starts: whatever is left of them ends with this.
class ProgramGroup {
 public:
  explicit ProgramGroup(pid_t leader) : leader_(leader), watchdog_(std::in_place, leader) {}
  ~ProgramGroup() { end(); }
  ProgramGroup(const ProgramGroup&) = delete;
  ProgramGroup& operator=(const ProgramGroup&) = delete;

  /// As waitpid() tells it.
  int end() noexcept {
    if (leader_ == 0) return status_;
    ::kill(-leader_, SIGKILL);
    watchdog_.reset();
    while (::waitpid(leader_, &status_, 0) < 0 && errno == EINTR) {
    }
    leader_ = 0;
    return status_;
  }
  /// Asks all to end, and gives the first of them, a launcher say, time to see to it.
  void ask_to_end() {
    constexpr std::chrono::seconds patience{10};
    const auto begin = Clock::now();
    ::kill(-leader_, SIGTERM);
    wait_for(leader_, [&] { return Clock::now() - begin > patience; });
  }

 private:
  pid_t leader_;
  std::optional<Watchdog> watchdog_;
  int status_ = 0;
};

struct Steps {
  double median = 0, spread = 0;
};
/// The median of the seconds of steps in a metrics file, and their spread, without the first step, which sets
/// up what later ones use.
Steps steps_in(const fs::path& metrics) {
  std::ifstream in(metrics);
  std::vector<double> seconds;
  for (std::string line; std::getline(in, line);) {
    const auto step = nlohmann::json::parse(line, nullptr, false);
    if (step.is_object() && step.contains("step_ms")) seconds.push_back(step["step_ms"].get<double>() / 1e3);
  }
  if (seconds.size() > 1) seconds.erase(seconds.begin());
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  const std::size_t n = seconds.size();
  const double median = (seconds[(n - 1) / 2] + seconds[n / 2]) / 2;
  return {median, (seconds[(3 * n - 1) / 4] - seconds[n / 4]) / median};
}

/// The first error that a program's log tells of, without the program's name; else how it ended, with the
/// last line.
std::string error_in(const fs::path& log, int code) {
  constexpr std::string_view mark = "error: ";
  constexpr std::size_t longest = 300;
  std::ifstream in(log);
  std::string last;
  for (std::string line; std::getline(in, line);) {
    if (const auto at = line.find(mark); at != std::string::npos)
      return excerpt(line.substr(at + mark.size()), longest);
    if (line.find_first_not_of(" \t\r-") != std::string::npos) last = line;
  }
  return cat("ended with exit code ", code, last.empty() ? "" : ": ", excerpt(last, longest), " (",
             log.string(), ")");
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
  return end.code == 0 ? "" : error_in(log, end.code);
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
  ProgramGroup group(child);
  if (!wait_for(child, [&] { return stopped() || too_long(); })) {
    const bool stop = stopped();
    group.ask_to_end();
    return {stop ? ProgramEnd::Kind::stopped : ProgramEnd::Kind::too_long};
  }
  const int status = group.end();
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
  program.insert(program.end(), {"--ranks", std::to_string(trial.ranks)});
  const ProgramEnd end = run_program_until(trial.launcher, program, log, trial.most_seconds, stopped);
  if (end.kind == ProgramEnd::Kind::stopped) fail(ErrorKind::interrupted, "stopped");
  TrialResult out{.failure = failure_of(end, trial, log)};
  if (!out.failure.empty()) return out;
  const Steps steps = steps_in(metrics);
  out.step_seconds = steps.median, out.spread = steps.spread;
  if (out.step_seconds <= 0) out.failure = cat("made no steps (", log.string(), ")");
  return out;
}

}  // namespace sherd::cli
