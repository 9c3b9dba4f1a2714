#include "cli/init/questions.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "base/error.h"

namespace sherd::cli {

InitQuestions::InitQuestions(const CommandLine& line)
    : line_(line), asks_(!line.has("yes") && ::isatty(STDIN_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1) {}

void InitQuestions::ask(const std::string& option, const std::string& question, const std::string& fallback,
                        const std::function<void(const std::string& value)>& take) const {
  if (line_.has(option) || !asks_) return take(line_.has(option) ? line_.text(option) : fallback);
  for (;;) {
    std::fprintf(stderr, "%s [%s]: ", question.c_str(), fallback.c_str());
    std::string answer;
    if (!std::getline(std::cin, answer)) {
      std::fputc('\n', stderr);
      fail(ErrorKind::usage,
           "the answers ended before the last question, and nothing was written: answer all, "
           "or give --yes to take what stands in brackets");
    }
    const auto first = answer.find_first_not_of(" \t\r"), last = answer.find_last_not_of(" \t\r");
    answer = first == std::string::npos ? fallback : answer.substr(first, last - first + 1);
    try {
      return take(answer);
    } catch (const UsageError& error) {
      std::fprintf(stderr, "  %s\n", error.what());
    }
  }
}

}  // namespace sherd::cli
