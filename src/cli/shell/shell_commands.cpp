#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/program.h"
#include "cli/shell/shell_files.h"

namespace sherd::cli {

CommandLine completion_line() {
  CommandLine line("completion",
                   "Prints a script by which a shell completes commands, options and their values.",
                   "bash|zsh|fish");
  line.list("shell", "bash|zsh|fish", "the shell").rest_to("shell");
  return line;
}

void completion_command(const CommandLine& line) {
  const std::vector<std::string> shells = line.all("shell");
  std::string (*script)() = nullptr;
  if (shells.size() == 1)
    script = shells[0] == "bash"   ? bash_completion
             : shells[0] == "zsh"  ? zsh_completion
             : shells[0] == "fish" ? fish_completion
                                   : nullptr;
  if (!script) throw UsageError("name a shell: bash, zsh or fish. See 'sherd completion --help'");
  std::fputs(script().c_str(), stdout);
}

CommandLine man_line() {
  CommandLine line("man", "Prints a manual page as roff, as `sherd man train | man -l -` reads it.",
                   "[COMMAND...] | --output DIR");
  line.list("command", "COMMAND", "the command, as train or bench adam; not given: the program")
      .value("output", "DIR", "write all pages into this folder instead")
      .rest_to("command");
  return line;
}

void man_command(const CommandLine& line) {
  const std::map<std::string, std::string> pages = man_pages();
  const std::vector<std::string> words = line.all("command");
  if (line.has("output")) {
    if (!words.empty()) throw UsageError("--output takes all pages: name no command");
    std::error_code error;
    std::filesystem::create_directories(line.text("output"), error);  // what fails is told of the first page
    for (const auto& [name, page] : pages)
      write_file_atomically(std::filesystem::path(line.text("output")) / name, page);
    return;
  }
  std::string name = "sherd";
  for (const std::string& word : words) name += "-" + word;
  const auto page = pages.find(name + ".1");
  if (page == pages.end()) {
    std::vector<std::string> names;
    for (const auto& [known, text] : pages) names.push_back(known.substr(0, known.size() - 2));
    throw UsageError(cat("there is no page '", excerpt(name), "'; ", suggest(name, names)));
  }
  std::fputs(page->second.c_str(), stdout);
}

}  // namespace sherd::cli
