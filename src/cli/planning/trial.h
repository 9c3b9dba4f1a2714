#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace sherd::cli {

/// How a program that was started ended.
struct ProgramEnd {
  enum class Kind : std::uint8_t { exited, killed, too_long, stopped };
  Kind kind = Kind::exited;
  int code = 0;  ///< of `exited` the exit code, of `killed` the signal
};

/// Runs a program with all that it starts, which is a process group of its own, until it ends, `seconds` are
/// over or `stopped` says so; then the group is asked to end (SIGTERM), and killed ten seconds later or once
/// its first process has ended. In any case nothing of the group is left. What it prints goes to the file
/// `log`, its input is empty. `launcher`: words for a shell that go before the program, as "mpirun -n 4"; may
/// be empty. Throws Error{io} where it cannot be started.
ProgramEnd run_program_until(const std::string& launcher, const std::vector<std::string>& program,
                             const std::filesystem::path& log, double seconds,
                             const std::function<bool()>& stopped);

/// A short training run, by `sherd train` as a program of its own: no error, not even want of memory, is more
/// than its own end.
struct Trial {
  std::string program;                 ///< the path of `sherd`
  std::string config;                  ///< the file of its configuration
  std::vector<std::string> overrides;  ///< keys of it that differ, among them the steps
  std::filesystem::path folder;        ///< of its files
  std::string name;                    ///< with which their names begin
  int ranks = 1;
  std::string launcher;  ///< starts them; empty: they are threads of one process
  double most_seconds = 600;
};

/// The result of a trial: seconds of a step, or why there are none.
struct TrialResult {
  double step_seconds = 0;  ///< the median of its steps but the first
  double spread = 0;        ///< from the first to the third quarter of them, as a share of that
  std::string failure;      ///< in a line; empty: it ran
};

/// Runs a trial. Throws Error{interrupted} where `stopped` ended it, and Error{io} where it could not begin.
TrialResult run_trial(const Trial& trial, const std::function<bool()>& stopped);

}  // namespace sherd::cli
