#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace sherd::comm {

/// The variables by which torchrun, and launchers that follow it, tell a process its place.
struct LaunchEnvironment {
  int rank = 0, world_size = 1;
  /// Among the processes of this machine; -1 and 0 where it does not say.
  int local_rank = -1, local_world_size = 0;
  std::string master_address;  ///< where rank 0 listens
  int master_port = 0;         ///< MASTER_PORT, or the one after it where torchrun itself listens on that
  std::string machine;         ///< CommOptions::machine
  std::string run;             ///< tells runs apart that meet at one port; may be empty
};

/// The launcher whose ranks this build's MPI joins.
inline constexpr const char* open_mpi = "OpenMPI's mpirun";

/// The variables of launchers that know nothing of RANK: OpenMPI's mpirun, those that speak PMI or PMIx,
/// srun and others of clusters.
struct ProcessLauncher {
  std::string name;
  std::vector<std::pair<std::string, std::string>> variables;  ///< the variables by which it is known
  int rank = -1, ranks = 0;                                    ///< -1 and 0 where it does not say
  bool mpi = false;                                            ///< MPI may join the ranks
};

using GetVariable = std::function<const char*(const char*)>;

/// The whole number of 0 and more that a variable holds, -1 where it is not set or holds something else.
int whole_number(const GetVariable& get, const char* name);

/// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (the latter two for more than one rank), LOCAL_RANK
/// and LOCAL_WORLD_SIZE where they are set. Without RANK and WORLD_SIZE what srun tells the tasks of a step:
/// rank 0 is on the step's first node, at a port that follows from job and step; MASTER_ADDR and MASTER_PORT
/// say otherwise. Nothing where no such launcher is. Throws Error{usage} naming the variable that is missing
/// or makes no sense.
std::optional<LaunchEnvironment> read_launch_environment(const GetVariable& get);

/// The first of the hosts that Slurm lists: "gpu[003-005,9],x1" begins with gpu003. Throws Error{usage} for a
/// list that is none.
std::string first_host(const std::string& list);

/// The one that started a process with these variables; nothing for a batch script, or the shell of an
/// allocation, whose tasks srun has yet to start.
std::optional<ProcessLauncher> find_process_launcher(const GetVariable& get);

/// The nodes of a job of Slurm's that a run with these variables leaves idle, as one whose batch script
/// starts the program without srun; in words and with what to do. Empty: none, or there is no such job.
std::string idle_nodes(const GetVariable& get);

/// The launcher that started a process with these variables; `with_mpi`: this build could join MPI's ranks.
Launcher find_launcher(const GetVariable& get, bool with_mpi);

}  // namespace sherd::comm
