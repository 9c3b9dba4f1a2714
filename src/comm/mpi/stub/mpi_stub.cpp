#include "comm/processes/process_group.h"

namespace sherd::comm {

bool mpi_available() {
  return false;
}

LaunchedWorld join_mpi_world(const CommOptions&) {
  fail(ErrorKind::usage,
       "this build has no MPI communicator: install OpenMPI's development package (on Debian "
       "libopenmpi-dev) and configure again with -DSHERD_WITH_MPI=ON, start the ranks with torchrun, or use "
       "local ranks (--ranks N)");
}

}  // namespace sherd::comm
