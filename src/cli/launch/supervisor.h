#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/launch/launch_hosts.h"

namespace sherd::cli {

/// The program that `sherd launch` starts, and where and how it does.
struct Launch {
  std::vector<LaunchHost> hosts;  ///< all places that there are
  std::vector<std::string> command;
  std::string ssh = "ssh";  ///< the words that start a program on another machine
  std::string address;      ///< where rank 0 listens; empty: on the first host that takes part
  std::string run;          ///< tells runs apart that meet at one port
  int port = 0;             ///< 0: one that is free, on one machine
  double grace_seconds = 30;
  int ranks = 0;      ///< to start, of the places that there are; the others stand by
  int min_ranks = 0;  ///< the fewest with which it goes on where places are lost
  int restarts = 0;
  int restarted = 0;           ///< restarts that were, of which ranks are told
  double backoff_seconds = 2;  ///< before the first restart; twice as long before each that follows, up to 60
};

/// torchrun's.
inline constexpr int usual_port = 29500;

/// Starts the ranks of host number `node` on this machine, and returns when they have ended, with the exit
/// code of the first that failed. With `follow_input` it reads signals from standard input, and tells in
/// lines of its output, for supervise() that has started it on another machine, which ranks failed.
int run_node(const Launch& launch, std::size_t node, bool follow_input);

/// Starts all ranks, and again where one fails, at most launch.restarts times: by then without hosts that do
/// not answer, and without places whose ranks have failed three times, for which others step in. Returns the
/// exit code: of the last try's first failure.
int supervise(const Launch& launch);

}  // namespace sherd::cli
