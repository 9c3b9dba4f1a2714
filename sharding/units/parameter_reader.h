#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "offload/store.h"
#include "sharding/segment.h"

namespace sherd::sharding {

class Unit;

/// Reads the shards of units that live on NVMe and are spread over one group into host memory, ahead of their
/// gathers and independently of other ranks. The memory is a fixed number of buffers, each as large as the
/// largest unit's shard. Peers can gather from it, and it is lent to the store, so that whole pages come from
/// the drive without a copy. Used from the rank's thread; the store reads beside it.
class ParameterReader {
 public:
  /// A unit's shards in memory: one tensor per stored segment, in the unit's order. The buffer is free for
  /// the next unit when `lease` goes.
  struct Staged {
    std::shared_ptr<void> lease;
    std::vector<Tensor> shards;
  };

  /// Collective. `store` holds the parameters, and is null where none are stored. `units` must outlive the
  /// reader. Throws Error{config} when the largest shard has more elements than `buffer_elements`
  /// (offload_param.buffer_size).
  ParameterReader(comm::Communicator& group, device::Device& device, offload::Store* store,
                  const std::vector<std::unique_ptr<Unit>>& units, int buffers, std::int64_t buffer_elements);
  ~ParameterReader();

  /// True when no unit has such parameters on NVMe.
  bool idle() const { return buffers_->all.empty(); }

  /// The order of the coming gathers (indices of units). Starts to read as far ahead as there are buffers.
  void expect(const std::vector<int>& units);
  /// A unit on demand is going to be taken, behind those announced before.
  void announce(const Unit& unit);
  /// Forgets the order and what was read ahead.
  void forget();

  /// Whether take() would find a buffer for `unit`.
  bool can_take(const Unit& unit) const;
  /// The shards of `unit`, read; waits for them. A unit out of order drops what was read ahead in
  /// order; any drops what takes the buffer that it needs. Throws Error{io}.
  Staged take(const Unit& unit);

  // ---- units that are outdated (Unit::outdated()) ----
  // They are not read before they have changed. A buffer that would be theirs waits for the new parameters
  // instead.
  /// Whether one does, of which nothing has come yet.
  bool awaits(const Unit& unit) const;
  /// New elements of the stored segment from flat element `begin` on; copied where a buffer waits for them.
  void hand_over(const Unit& unit, const Segment& segment, std::int64_t begin, const Tensor& from);
  /// Starts to read as far ahead as buffers and changes of units allow.
  void read_ahead();

 private:
  struct HostBuffers {
    std::vector<Tensor> all;  ///< uint8, on page boundaries
    std::vector<offload::Loan> loans;
    std::vector<std::size_t> free;
  };
  struct PendingRead {
    int unit = -1;
    Staged staged;
    std::int64_t awaited = 0;      ///< elements that an update is to hand over
    std::vector<offload::Io> ios;  ///< go first: they write into the staged memory
  };

  PendingRead start(const Unit& unit);
  bool on_demand(int unit) const;
  void make_room();

  const comm::Communicator& group_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  std::shared_ptr<HostBuffers> buffers_;
  std::size_t reserved_ = 0;  ///< buffers that units in order leave to those on demand
  std::deque<int> expected_, announced_;
  std::deque<PendingRead> ahead_;
};

}  // namespace sherd::sharding
