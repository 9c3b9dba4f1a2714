#pragma once

#include <string>
#include <vector>

namespace sherd::cli {

using Arguments = std::vector<std::string>;

/// Thrown by a command that has done its work and printed what it found, to end the program with `code`.
struct Finding {
  int code;
};
/// Of `sherd estimate` where the run does not fit.
inline constexpr int does_not_fit = 3;

/// Runs `sherd ARGUMENTS…` and returns its exit code: 0; 2 for a wrong command line; 1 for any other error;
/// or a Finding's. Every error is printed to stderr, "sherd: error: …": one line, or one for each problem of
/// a configuration.
int run_program(const Arguments& arguments);

// The commands. Each takes what follows its name, and throws UsageError or Error. One file each; listed in
// program.cpp.
void train_command(const Arguments& arguments);
void estimate_command(const Arguments& arguments);
void bench_command(const Arguments& arguments);
void generate_command(const Arguments& arguments);
void info_command(const Arguments& arguments);
void plot_command(const Arguments& arguments);
void prepare_command(const Arguments& arguments);

}  // namespace sherd::cli
