#pragma once

#include <vector>

#include "comm/messages/port.h"
#include "comm/processes/identity.h"
#include "comm/tcp/launch_environment.h"
#include "comm/tcp/socket.h"

namespace sherd::comm {

/// The connections that the ranks of a launch have once they met.
struct Meeting {
  std::vector<FileDescriptor> links;     ///< a connection to every rank, by rank; empty for this one
  std::vector<RankIdentity> identities;  ///< by rank
};

/// Collective: brings the ranks of a launch together. Rank 0 listens on the master's port; the others tell it
/// who they are and where they listen themselves, and are told where all do. Whoever connects and does not
/// speak as a rank of this run is turned away and does no harm; ranks that contradict each other end the
/// meeting for all. The connections carry no secrets and trust whoever speaks first: for the networks on
/// which NCCL's and MPI's do the same.
///
/// Throws Error{comm} naming who did not come, could not be reached or contradicts, and why; on all ranks
/// that rank 0 can still tell.
Meeting rendezvous(const LaunchEnvironment& launch, const Patience& patience);

}  // namespace sherd::comm
