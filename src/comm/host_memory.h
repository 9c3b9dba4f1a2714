#pragma once

#include <cstdint>

namespace sherd::comm {

/// A ceiling, in bytes, for the memory of the host that a rank of a group of processes takes for exchanging,
/// beside the tensors that it exchanges; it is on nobody's books. 0 for one rank. `ranks_of_machine`: of the
/// group, on one machine.
///
/// - Where several ranks share a machine, the rank's part of the board: its calls, the stage and the rings
///   through which tensors go that other ranks do not see. The shared windows of Communicator::allocate() are
///   charged as what they hold.
/// - Where the group spans machines, the parts and partial sums of one chunk of a reduction, and the messages
///   that may lie here unasked: from every rank what a call may send so (Messages::eager_bytes), and as much
///   of each machine that is ahead. Buffers of sockets are not counted.
std::uint64_t host_memory(int ranks, int ranks_of_machine);

}  // namespace sherd::comm
