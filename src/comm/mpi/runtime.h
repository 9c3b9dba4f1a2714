#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/messages/port.h"
#include "comm/processes/identity.h"

namespace sherd::comm::mpi {

/// MPI's group of all processes, a private copy of MPI_COMM_WORLD; starts MPI at the first call. Everything
/// that Sherd asks of MPI is in mpi_port.cpp and runtime.cpp. Calls that block inside MPI run on a helper
/// thread, which is abandoned (and MPI_Finalize skipped at exit) when a peer dies or the deadline passes.
/// Throws Error{comm}.
///
/// `machine`: CommOptions::machine of this rank.
std::shared_ptr<Port> world_port(const Patience& patience, const std::string& machine);

/// Starts MPI with full thread support, and arranges that it ends with the process: MPI_Finalize when all
/// ranks come to their exit within `seconds` (3 after a failure) and nothing was abandoned; otherwise not,
/// for it could hang. Safe to call again.
void start(double seconds);

/// Runs a call that blocks inside MPI. Throws Error{comm} when it has not returned by the deadline, or when
/// `dead` names a rank (it returns -1 while all live); MPI is then not finalised at exit.
void blocking(const std::function<void()>& call, const Patience& patience, const std::function<int()>& dead);

/// Calls `tell` when the process begins to exit, so that peers need not wait for a rank that exits with its
/// groups alive. It must not wait.
void on_leave(std::function<void()> tell);

/// MPI has been finalised, or was aborted.
bool over();

/// Throws Error{comm} unless `code` is success.
void check(int code, const char* call);

/// The process of every rank of MPI_COMM_WORLD; pid 0 where a process cannot be watched from here.
const std::vector<RankIdentity>& identities();

}  // namespace sherd::comm::mpi
