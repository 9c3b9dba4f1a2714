#pragma once

#include <cstdint>
#include <vector>

#include "comm/exchange/machine.h"

namespace sherd::comm {

/// Point to point between ranks of one machine: one channel of message slots per ordered pair. The receiver
/// copies straight from the sender's memory, or, where that is hidden, from the pair's ring. As Backend's
/// functions of these names.
class MemoryTransfers {
 public:
  MemoryTransfers(MachineTransport& machine, const Topology& topology)
      : machine_(machine),
        topology_(topology),
        sends_(topology.locals().size()),
        receives_(sends_.size()),
        filled_slots_(sends_.size()) {}

  void start(Call& transfer);
  bool advance(Call& transfer);

 private:
  bool advance_send(Call& transfer);
  bool advance_receive(Call& transfer);
  void copy_from_peer(const Call& transfer, const Address& address);
  bool fill_ring(Call& transfer);
  bool drain_ring(Call& transfer);
  int peer_of(const Call& transfer) const { return topology_.local_index(transfer.peer); }

  MachineTransport& machine_;
  const Topology& topology_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer on the board
  std::vector<std::uint64_t> filled_slots_;      ///< sends whose bytes are all on their way, by peer
};

}  // namespace sherd::comm
