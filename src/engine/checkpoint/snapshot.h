#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "engine/checkpoint/writer.h"

namespace sherd::engine {

/// A rank's states that training changes, as they are at one moment, for a thread that writes it while
/// training goes on: a copy in the host tier; of states on NVMe only the promise that updates do not
/// overwrite what has not been read (offload::DeferredRead). The memory is kept from one snapshot to the
/// next, as an allocator would keep it anyway. Made and taken on the rank's thread.
class Snapshots {
 public:
  /// Both must outlive it, and what it takes.
  Snapshots(const sharding::ShardedModel& model, device::Device& device) : model_(model), device_(device) {}

  /// Bytes of the host tier that a snapshot takes.
  std::size_t bytes() const;
  /// Takes that memory, unless it is there. Throws Error{memory} at the ledger's limit, or where the system
  /// has no more.
  void reserve();
  /// Copies. The tensors' elements are to be read once, by one thread, before the next take(); what they
  /// still hold of NVMe goes with them. Throws the store's errors.
  std::vector<FileTensor> take();

 private:
  const sharding::ShardedModel& model_;
  device::Device& device_;
  device::Storage memory_;        ///< of the copies, and after them of what the other thread reads
  std::shared_ptr<Arena> arena_;  ///< of the other thread
};

}  // namespace sherd::engine
