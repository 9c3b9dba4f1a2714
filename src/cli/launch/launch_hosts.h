#pragma once

#include <string>
#include <vector>

namespace sherd::cli {

/// A machine, and the places for ranks on it: the GPUs of these numbers, or as many processes.
struct LaunchHost {
  std::string name;
  std::vector<int> slots;

  /// Whether the places are all those from 0 on, as on a machine of which nothing is left out.
  bool is_whole() const;
  int ranks() const { return static_cast<int>(slots.size()); }
};

/// A machine with places 0, 1, … `count` - 1.
LaunchHost host_with(std::string name, int count);
/// How many places all have.
int ranks_on(const std::vector<LaunchHost>& hosts);

/// "worker-1 slots=4", a line each, as DeepSpeed's files have them; # begins a comment. Throws Error{io} and
/// Error{config}, which names the line.
std::vector<LaunchHost> read_hosts(const std::string& path);

/// "a=4,b=+0+1+3" (places 0 to 3 of a; b without its place 2), as the launcher gives them to those that it
/// starts. Throws UsageError.
std::vector<LaunchHost> parse_hosts(const std::string& text);
std::string host_list(const std::vector<LaunchHost>& hosts);

/// Whether that is this machine.
bool is_here(const std::string& host);

}  // namespace sherd::cli
