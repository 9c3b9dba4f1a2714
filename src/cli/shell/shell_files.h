#pragma once

#include <map>
#include <string>

namespace sherd::cli {

/// Scripts that complete commands, options and their values. Each is read by its shell at its start, or lies
/// where the shell looks for it (docs/cli.md, "Manual pages and completion").
std::string bash_completion();
std::string zsh_completion();
std::string fish_completion();

/// Manual pages as roff, by the names of their files: "sherd.1", "sherd-bench-adam.1".
std::map<std::string, std::string> man_pages();

}  // namespace sherd::cli
