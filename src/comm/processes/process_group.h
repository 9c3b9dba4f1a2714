#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// The world of the processes that a port joins, whatever started them: ranks of one machine exchange through
/// shared windows of the port, others by its messages; groups split from it likewise. Collective. Throws
/// Error{comm}.
LaunchedWorld make_process_world(std::shared_ptr<Port> port, const CommOptions& options);

/// MPI's ranks; see make_mpi_world().
LaunchedWorld join_mpi_world(const CommOptions& options);

}  // namespace sherd::comm
