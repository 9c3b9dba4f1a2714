#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/tcp/launch_environment.h"

namespace sherd::comm {

/// The ranks of a launch over TCP connections. Collective. Throws Error{comm}.
std::unique_ptr<Communicator> make_tcp_world(const LaunchEnvironment& launch, const CommOptions& options);

// Not offered to programs yet: over TCP, a rank that is late is not always named at the deadline.

/// True when RANK or WORLD_SIZE in the environment says that a launcher like torchrun started the process.
bool launched_by_environment();
/// Ranks on this machine according to that environment (LOCAL_WORLD_SIZE). Throws Error{usage} where it makes no sense.
int environment_local_size();
/// The world of the ranks that such a launcher started, over TCP; rank 0 listens on MASTER_PORT. On GPUs of their own,
/// bind() moves tensors to NCCL. Collective. Throws Error{usage} for variables that are missing or make no sense,
/// Error{comm} naming ranks that do not come.
std::unique_ptr<Communicator> make_environment_world(const CommOptions& options);

}  // namespace sherd::comm
