#pragma once

#include <functional>
#include <optional>
#include <string>

#include "comm/communicator.h"

namespace sherd::comm {

/// What torchrun, and launchers that follow it, tell a process.
struct LaunchEnvironment {
  int rank = 0, world_size = 1;
  int local_rank = -1,
      local_world_size = 0;    ///< among the processes of this machine; -1 and 0 where it does not say
  std::string master_address;  ///< where rank 0 listens
  int master_port = 0;         ///< MASTER_PORT, or the one after it where torchrun itself listens on that
  std::string machine;         ///< CommOptions::machine
  std::string run;             ///< tells runs apart that meet at one port; may be empty
};

using GetVariable = std::function<const char*(const char*)>;

/// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (the latter two for more than one rank), LOCAL_RANK
/// and LOCAL_WORLD_SIZE where they are set. Nothing where neither RANK nor WORLD_SIZE is. Throws Error{usage}
/// naming the variable that is missing or makes no sense.
std::optional<LaunchEnvironment> read_launch_environment(const GetVariable& get);
/// Of this process.
std::optional<LaunchEnvironment> read_launch_environment();

/// What started a process with these variables; `with_mpi`: this build could join MPI's ranks.
Launcher find_launcher(const GetVariable& get, bool with_mpi);

}  // namespace sherd::comm
