#pragma once

#include "comm/communicator.h"
#include "comm/tcp/launch_environment.h"

namespace sherd::comm {

/// The ranks of a launch over TCP connections, through shared memory where they are on one machine and can
/// map each other's. Collective. Throws Error{comm} naming ranks that do not come or contradict each other.
LaunchedWorld join_tcp_world(LaunchEnvironment launch, const CommOptions& options);

}  // namespace sherd::comm
