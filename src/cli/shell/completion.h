#pragma once

#include <string>

namespace sherd::cli {

/// Scripts that complete commands, options and their values. Each is read by its shell at its start, or lies
/// where the shell looks for it (docs/cli.md, "Manual pages and completion").
std::string bash_completion();
std::string zsh_completion();
std::string fish_completion();

}  // namespace sherd::cli
