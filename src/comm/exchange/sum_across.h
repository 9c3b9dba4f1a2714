#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/exchange/machine.h"
#include "comm/messages/messages.h"

namespace sherd::comm {

/// A sum of which every rank, as an owner, gets a block.
struct Summed {
  std::byte* full = nullptr;  ///< the owners' blocks of this rank's tensor
  std::size_t bytes = 0;
  std::function<std::int64_t(int owner)> first, count;  ///< elements
  std::int64_t longest = 0;
  ReduceSpec how;            ///< with `onto` at the first element of this rank's block
  std::byte* out = nullptr;  ///< where this rank's block goes
};

/// The type in which partial sums travel.
DType wide_type(const ReduceSpec& how);

/// Tells by owner whether its sum goes as a chain from machine to machine, segment by segment in rank order,
/// beginning with the owner's `onto`, so that one partial sum crosses between two segments. Otherwise every
/// rank of another machine sends its part to the owner, which is done where it takes no more bytes, as
/// between machines of one rank each. The same on all ranks, and never a chain for fp64, whose sums may be of
/// another type than the one that they go on from.
std::vector<bool> plan_chains(const Topology& topology, const ReduceSpec& how);

/// The part of one reduction that crosses between machines, in bytes per element of an owner's block.
std::size_t crossing_bytes(const Topology& topology, const ReduceSpec& how, int owner, bool chain);

/// Memory beside the tensors, kept from call to call.
class ReduceScratch {
 public:
  /// Until the next reset().
  std::byte* take(std::size_t bytes);
  void reset() { used_ = 0; }

 private:
  std::vector<std::pair<std::unique_ptr<std::byte[]>, std::size_t>> blocks_;
  std::size_t used_ = 0;
};

/// The sums of one call over ranks of several machines, step by step: one chunk of the blocks each. All ranks
/// take the same steps.
class SumAcross {
 public:
  SumAcross(const Call& call, const Topology& topology, MachineTransport& machine, Messages& messages,
            ReduceScratch& scratch, std::span<const Summed> works);
  void step(std::size_t index, const MachineTransport::View& view);
  /// Waits for the sums that are still on their way here.
  void finish();

 private:
  /// One segment's part of an owner's chain, which is this rank's to add.
  struct Link {
    std::size_t segment = 0;
    int owner = 0;
    Messages::Ticket ticket = 0;
    std::byte* partial = nullptr;  ///< null where the sum begins here, or with this rank's own onto
  };
  /// An own sum that comes from the last machine of its chain.
  struct Final {
    Messages::Landing sum;
    Messages::Ticket ticket = 0;
    std::size_t index = 0;
    std::int64_t begin = 0, count = 0;
  };

  const std::vector<Topology::LocalRanks>& segments() const { return topology_.segments(); }
  int worker_of(std::size_t segment, int owner) const {
    return topology_.deputy(segments()[segment].machine, owner);
  }
  bool ends_here(int owner) const { return worker_of(segments().size() - 1, owner) == owner; }
  /// Posts the receives of this step, in the order in which ranks send.
  void receive(const Summed& work, std::size_t index, const MachineTransport::View& view);
  void send_own(const Summed& work, const MachineTransport::View& view);
  void add_link(const Summed& work, const MachineTransport::View& view, const Link& link);
  void add_direct(const Summed& work, const MachineTransport::View& view);
  void complete(Final final);
  std::byte* out_at(const Summed& work, std::int64_t begin) const {
    return work.out + static_cast<std::size_t>(begin) * size_of(work.how.out);
  }
  const std::byte* onto_at(const Summed& work, std::int64_t begin) const {
    return work.how.onto + static_cast<std::size_t>(begin) * size_of(work.how.onto_type);
  }
  void combine(ReduceSpec how, const std::byte* partial, DType partial_type,
               std::vector<const std::byte*> sources, std::byte* out, std::int64_t count);

  const Call& call_;
  const Topology& topology_;
  MachineTransport& machine_;
  Messages& messages_;
  ReduceScratch& scratch_;
  std::span<const Summed> works_;
  std::vector<std::vector<bool>> chains_;  ///< by work, owner
  // The state of the current step:
  std::vector<Link> links_;
  std::vector<std::byte*> parts_;  ///< the ranks' parts of this rank's block; null where read in place
  std::vector<Messages::Ticket> part_tickets_, tickets_;
  std::deque<Final> finals_;  ///< under way, of this and earlier steps
};

}  // namespace sherd::comm
