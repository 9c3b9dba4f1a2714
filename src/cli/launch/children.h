#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace sherd::cli {

/// A program that runs beside others.
struct ChildProgram {
  std::string name;  ///< "rank 3", for errors
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> environment{};  ///< beside this process's own
  std::string prefix{};                                            ///< of each line that it prints
  /// Whether signals reach the program as lines of its input, "signal 15", with whose end it ends: for one on
  /// another machine, which a signal cannot reach.
  bool signals_by_input = false;
};

/// A program that did not end well.
struct ChildFailure {
  std::size_t program = 0;   ///< its number among those that were started
  int code = 0;              ///< its exit code, 128 + its signal's number
  bool ended_by_us = false;  ///< it had been asked to end, as another had failed and the grace was over
  bool by_signal = false;    ///< a signal ended it, which the code tells: what ends with 137 by itself is not
};

/// How a program ended, as its code tells: "ended with exit code 3", "was killed by signal 9 (SIGKILL)".
std::string ending_of(int code, bool by_signal);

/// How programs that ran beside each other ended.
struct ChildrenEnd {
  int code = 0;        ///< of the first that failed: its exit code, 128 + its signal's number; 0: none has
  std::string failed;  ///< its name
  int asked = 0;       ///< the signal that asked this process to stop, which was passed on; 0: none
  std::vector<ChildFailure> failures;  ///< in the order in which they were found
  /// Lines of programs with signals_by_input that begin with report_mark, without it: they are not passed on.
  std::vector<std::pair<std::size_t, std::string>> reports;
};

inline constexpr char report_mark = '\x02';

struct ChildrenOptions {
  /// Seconds from the first failure on in which the others may find out and report it, before they are asked
  /// to end.
  double grace_seconds = 30;
  /// Reads signals for the programs from standard input, as signals_by_input writes them; its end ends them.
  bool follow_input = false;
  bool quiet = false;       ///< says nothing of programs that fail
  double most_seconds = 0;  ///< then those that are left are asked to end; 0: they may go on
  /// Told the programs' processes once all have been started.
  std::function<void(const std::vector<int>& processes)> started = nullptr;
};

/// Starts the programs, each the first of a process group of its own, and passes on what they print, line by
/// line, until all have ended. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to all of them. Where one
/// fails the others are asked to end (SIGTERM) after the grace, and killed after as long again, at most ten
/// seconds; without a grace where this process is killed. What they print is written to where this process's
/// goes, for as long as that takes. Throws Error{io} where one cannot be started; then none is left. The
/// calling thread is the process's only one.
ChildrenEnd run_children(const std::vector<ChildProgram>& programs, const ChildrenOptions& options);

}  // namespace sherd::cli
