#pragma once

#include <cstdint>

namespace sherd::comm {

/// A ceiling, in bytes, for the memory of the host that a rank of a group of processes takes for exchanging,
/// beside the tensors that it exchanges; no ledger counts it. 0 for one rank. `ranks_of_machine`: of the
/// group, on one machine.
///
/// - Where several ranks share a machine, the rank's part of the board: its calls, the stage and the rings
///   through which tensors go that other ranks do not see. The shared windows of Communicator::allocate() are
///   charged as what they hold.
/// - Where the group spans machines, the parts and partial sums of one chunk of a reduction, and the messages
///   that may lie here unasked: from every rank what a call may send so (Messages::eager_bytes), and as much
///   of each machine that is ahead. Buffers of sockets are not counted.
std::uint64_t host_memory(int ranks, int ranks_of_machine);

/// A ceiling, in bytes, for the memory of a GPU that NCCL takes for itself where every rank has a GPU of its
/// own; no ledger counts it. 0 for one rank.
///
/// Sums travel as messages between every two ranks, so NCCL connects them all: on one machine with NVLink
/// through as many as 32 channels per pair (`channels`), each with 10 MiB to receive into (FIFOs of its three
/// protocols: 4 MiB, 4.7 MiB and 0.5 MiB, on pages of 2 MiB) and 2 MiB to send from. The rings of gathers and
/// broadcasts take as much as one more pair. Between machines there are a ring's FIFOs to send and to
/// receive, 10 MiB each, and 128 MiB that all messages share. To these come the 64 MiB into which Sherd
/// receives parts of sums. After NCCL's sources of 2026 (transport/p2p.cc and net.cc, graph/paths.cc); for
/// eight H100 this says 3.3 GB, which is what one user saw there (NVIDIA/nccl issue 1685). Over PCIe, where a
/// pair has 2 channels, it is far too much.
std::uint64_t nccl_memory(int ranks, int ranks_of_machine, int channels);

/// The same of the communicators that point-to-point transfers make, one for each pair and direction
/// (nccl/nccl_transfers.h): what `sends` such pairs take on the sender and `receives` on the receiver, which
/// hold 2 MiB and 10 MiB per channel on one machine, and 128 MiB each between machines. They make no rings.
std::uint64_t nccl_pairs_memory(int sends, int receives, bool one_machine, int channels);

/// The channels that NCCL may use of a pair of ranks, at most 32: NCCL_MAX_P2P_NCHANNELS and NCCL_MAX_CTAS
/// (or its older name NCCL_MAX_NCHANNELS) in the environment lower it, for NCCL and for what is charged.
int nccl_channels();

}  // namespace sherd::comm
