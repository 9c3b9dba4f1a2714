#include "comm/communicator.h"

namespace sherd::comm {

bool mpi_available() {
  return false;
}

std::unique_ptr<Communicator> make_mpi_world(const CommOptions&) {
  fail(ErrorKind::usage,
       "this build has no MPI communicator: install OpenMPI's development package (on Debian "
       "libopenmpi-dev) and configure again with -DSHERD_WITH_MPI=ON, or use local ranks (--ranks N)");
}

}  // namespace sherd::comm
