#include <cstdlib>

#include "comm/communicator.h"

namespace sherd::comm {

bool launched_by_mpi() {
  // Set by OpenMPI's mpirun; by PMIx launchers (srun --mpi=pmix, prterun); by PMI-1/2 ones (srun, Hydra).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"})
    if (const char* value = std::getenv(name); value && *value) return true;
  return false;
}

}  // namespace sherd::comm
