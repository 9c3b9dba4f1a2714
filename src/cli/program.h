#pragma once

// This room is the program `sherd`: its commands, and what they print.
//
// To change, look at:
// - the commands: commands[], program.cpp; each is a file, *_command.cpp: X_line() declares its options,
//   X_command() runs it
// - what a training run does: train_run.cpp, by engine/trainer.h; its replay: verification/replay.h
// - sizes that do not fit, told at once: raise_sizes(), planning/fit.cpp; this machine's memory:
//   engine/report/machine.h; plans: planning/search.h
// - plan, tune and estimate: cli/planning; trial.h there tries a plan
// - manual pages, and what shells complete, by the commands' declarations: cli/shell
// - starting ranks here and on other machines: launch/supervisor.h; children.h runs the programs
// - where weights to begin with come from (training.init_from): weights.cpp
// - pictures of a run (plot, watch, report): metrics/metrics_file.h; configurations by questions: init/
// - how commands find a checkpoint and run its model: inference/inference.h; chat: inference/chat.h; tasks
//   and metrics: inference/evaluation.cpp; what is exported beside weights: inference/exported_tokenizer.h

#include <span>
#include <string>
#include <vector>

#include "cli/command_line.h"

namespace sherd::cli {

using Arguments = std::vector<std::string>;

/// Thrown by a command that has done its work and printed what it found, to end the program with `code`.
struct Finding {
  int code;
};
/// The exit code of what `signal` stopped, as shells name it: 130 for SIGINT, 143 for SIGTERM, 129 for
/// SIGHUP, 138 for SIGUSR1.
constexpr int stopped_by(int signal) {
  return 128 + signal;
}
/// The exit code of a wrong command line or configuration: the same command would end so again.
inline constexpr int wrong_use = 2;
/// The exit code of `sherd estimate` where the run does not fit.
inline constexpr int does_not_fit = 3;
/// The exit code of a rank that ended because others did, or did not come: ErrorKind::comm.
inline constexpr int lost_others = 4;
/// The exit code of `sherd verify` where the run is not as it was saved, or not all of that can be checked.
inline constexpr int does_not_agree = 5;

/// For the start of main(): makes a write that nobody reads (`| head`) or that is beyond the limit of file
/// sizes (ulimit -f) fail with EPIPE or EFBIG rather than end the program by SIGPIPE or SIGXFSZ, lets a
/// SIGUSR2 pass that nobody answers yet or any more, and has standard streams that were closed read and write
/// nothing, so that no file that is opened gets their numbers. Programs started from here have the signals'
/// defaults.
void prepare_process();

/// Runs `sherd ARGUMENTS…` and returns its exit code: 0; 2 for a wrong command line or configuration, which
/// would come again; stopped_by() for a signal that was waited for; lost_others; 1 for any other error, also
/// where what was printed could not be written; or a Finding's. A reader of the output that has gone has read
/// what it wanted: that is no error, here and in training. Every error is printed to stderr, "sherd: error:
/// …": one line, or one for each problem of a configuration.
int run_program(const Arguments& arguments);

/// Prints a command's results on stdout.
void print_text(const std::string& text);
/// Prints them as --json asks for: an nlohmann::ordered_json.
template <class Json>
void print_json(const Json& results) {
  print_text(results.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

/// A command: its options are declared apart from what it does, for help, manual pages and completion, too.
struct Command {
  const char* name;
  const char* summary;                             ///< a line of the overview
  CommandLine (*line)();                           ///< declares its options
  void (*run)(const CommandLine& line) = nullptr;  ///< throws UsageError or Error
  /// The commands of a group ("bench"), which does not run itself.
  std::span<const Command> (*commands)() = nullptr;
};
/// All commands, in the overview's order.
std::span<const Command> all_commands();

// The commands, a file each, listed in program.cpp.
CommandLine init_line();
void init_command(const CommandLine& line);
CommandLine train_line();
void train_command(const CommandLine& line);
CommandLine estimate_line();
void estimate_command(const CommandLine& line);
CommandLine plan_line();
void plan_command(const CommandLine& line);
CommandLine launch_line();
void launch_command(const CommandLine& line);
CommandLine verify_line();
void verify_command(const CommandLine& line);
CommandLine tune_line();
void tune_command(const CommandLine& line);
CommandLine bench_group();
std::span<const Command> bench_commands();
CommandLine generate_line();
void generate_command(const CommandLine& line);
CommandLine evaluate_line();
void evaluate_command(const CommandLine& line);
CommandLine info_line();
void info_command(const CommandLine& line);
CommandLine plot_line();
void plot_command(const CommandLine& line);
CommandLine watch_line();
void watch_command(const CommandLine& line);
CommandLine report_line();
void report_command(const CommandLine& line);
CommandLine prepare_line();
void prepare_command(const CommandLine& line);
CommandLine import_line();
void import_command(const CommandLine& line);
CommandLine export_line();
void export_command(const CommandLine& line);
CommandLine checkpoint_line();
void checkpoint_command(const CommandLine& line);
CommandLine completion_line();
void completion_command(const CommandLine& line);
CommandLine man_line();
void man_command(const CommandLine& line);

}  // namespace sherd::cli
