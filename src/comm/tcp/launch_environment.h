#pragma once

#include <functional>
#include <optional>
#include <string>

namespace sherd::comm {

/// What torchrun, and launchers that follow it, tell a process.
struct LaunchEnvironment {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;  ///< among the processes of this machine
  std::string master_address;                ///< where rank 0 listens
  int master_port = 0;         ///< MASTER_PORT, or the one after it where torchrun itself listens on that
};

using GetVariable = std::function<const char*(const char*)>;

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (by default WORLD_SIZE: one machine), MASTER_ADDR and MASTER_PORT
/// (the latter two for more than one rank). Nothing where
/// neither RANK nor WORLD_SIZE is set. Throws Error{usage} naming the variable that is missing or makes no sense.
std::optional<LaunchEnvironment> read_launch_environment(const GetVariable& get);
/// Of this process.
std::optional<LaunchEnvironment> read_launch_environment();

}  // namespace sherd::comm
