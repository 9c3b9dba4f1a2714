#pragma once

#include <functional>
#include <string>

#include "cli/command_line.h"

namespace sherd::cli {

/// Takes answers from options or, where somebody sits at a terminal, by asking for those that no option
/// gives.
class InitQuestions {
 public:
  /// Asks nobody where standard input or error is no terminal, or with --yes.
  explicit InitQuestions(const CommandLine& line);

  bool asks() const { return asks_; }
  /// The value of `option`, or what `question` is answered with; `fallback` for an empty answer and where
  /// nobody is asked. `take` throws UsageError for a value that will not do: at the terminal the question
  /// comes again, from an option it is the command's error. Throws Error{usage} where input ends.
  void ask(const std::string& option, const std::string& question, const std::string& fallback,
           const std::function<void(const std::string& value)>& take) const;

 private:
  const CommandLine& line_;
  bool asks_;
};

}  // namespace sherd::cli
