#pragma once

#include <string>
#include <vector>

namespace sherd::cli {

using Arguments = std::vector<std::string>;

/// Runs `sherd ARGUMENTS…` and returns its exit code: 0; 2 for a wrong command line; 1 for any other error.
/// Every error is printed to stderr, "sherd: error: …": one line, or one for each problem of a configuration.
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
