#pragma once

#include <string>

#include "cli/command_line.h"
#include "cli/weights.h"
#include "config/machine.h"
#include "planning/search.h"

namespace sherd::cli {

/// The search that `sherd plan` and `sherd tune` are asked for.
struct PlanRequest {
  ConfigFiles files;
  config::Machine machine;        ///< with as many ranks as --gpus says
  config::Machine whole_machine;  ///< as the file has it
  planning::SearchOptions options;

  /// Declares the options of both commands; `top` is how many layouts are wanted unless --top says, `goals`
  /// what --goal may be: "time|memory".
  static void declare(CommandLine& line, const std::string& top, const std::string& goals);
  /// Reads them for `command`. Throws UsageError, and what reading the machine's file throws.
  static PlanRequest of(const CommandLine& line, const std::string& command);

  /// The configuration, which has a model. Throws Error{config} where it has none.
  config::Config configuration() const;
  /// The best layouts by the rates of `machine`. Throws what planning::search() throws.
  planning::SearchResult search() const;
  /// Overrides that make the configuration this plan.
  static std::vector<std::string> overrides(const planning::Plan& plan);
  /// Writes the plan as a configuration that `sherd train` takes, with `more` keys.
  void write(const planning::Plan& plan, const std::string& path,
             const std::vector<std::string>& more = {}) const;
};

}  // namespace sherd::cli
