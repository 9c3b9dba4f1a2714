#include <cstdlib>

#include "comm/communicator.h"
#include "comm/tcp/tcp_world.h"

namespace sherd::comm {

bool launched_by_mpi() {
  // Set by OpenMPI's mpirun; by PMIx launchers (srun --mpi=pmix, prterun); by PMI-1/2 ones (srun, Hydra).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"})
    if (const char* value = std::getenv(name); value && *value) return true;
  return false;
}

bool launched_by_environment() {
  return read_launch_environment().has_value();
}

int environment_local_size() {
  const auto launch = read_launch_environment();
  return launch ? launch->local_world_size : 1;
}

std::unique_ptr<Communicator> make_environment_world(const CommOptions& options) {
  const auto launch = read_launch_environment();
  require(launch.has_value(), "neither RANK nor WORLD_SIZE is set: no launcher started this process");
  return launch->world_size == 1 ? make_self(options) : make_tcp_world(*launch, options);
}

}  // namespace sherd::comm
