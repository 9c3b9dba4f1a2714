#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/tcp/launch_environment.h"

namespace sherd::comm {

/// The ranks of a launch over TCP connections. Collective. Throws Error{comm}.
std::unique_ptr<Communicator> make_tcp_world(const LaunchEnvironment& launch, const CommOptions& options);

}  // namespace sherd::comm
