#include "comm/mpi/runtime.h"
#include "comm/processes/process_group.h"

namespace sherd::comm {

bool mpi_available() {
  return true;
}

LaunchedWorld join_mpi_world(const CommOptions& options) {
  const Patience patience{setup_seconds(options), "setting up the world of MPI ranks"};
  return make_process_world(mpi::world_port(patience, options.machine), options);
}

std::unique_ptr<Communicator> make_mpi_world(const CommOptions& options) {
  return join_mpi_world(options).world;
}

}  // namespace sherd::comm
