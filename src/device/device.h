#pragma once

// This room has memory and streams: what a rank's arrays lie in, and in which order work runs on them.
//
// To change, look at:
// - how memory is tracked and limited: Ledger, ledger.h, charged by Device::allocate()
// - streams, events and what is queued: stream.h; sequences that come again as graphs: graph/
// - blocks on processors: heap/; blocks that are kept when they are freed: cache/
// - an estimate's device, which has no memory: meta/; processors: cpu/; NVIDIA's cards: cuda/, with a stub/

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "base/deadline.h"
#include "device/ledger.h"

namespace sherd::device {

/// A block of memory with one owner; the last Storage handle returns it. Buffers start on 64-byte boundaries.
struct MemoryBlock {
  std::byte* data = nullptr;
  std::size_t bytes = 0;  ///< bytes that were asked for and charged to the ledger
};

/// Shared handle to a MemoryBlock. `release` runs when the last handle goes, on whichever thread that is.
class Storage {
 public:
  Storage() = default;
  Storage(MemoryBlock block, std::function<void(MemoryBlock)> release);

  std::byte* data() const { return state_ ? state_->block.data : nullptr; }
  std::size_t bytes() const { return state_ ? state_->block.bytes : 0; }
  explicit operator bool() const { return state_ != nullptr; }
  /// True when this is the only handle.
  bool unique() const { return state_.use_count() == 1; }
  bool same_as(const Storage& other) const { return state_ == other.state_; }

 private:
  struct State {
    State(MemoryBlock b, std::function<void(MemoryBlock)> r) : block(b), release(std::move(r)) {}
    ~State() {
      if (release) release(block);
    }
    MemoryBlock block;
    std::function<void(MemoryBlock)> release;
  };
  std::shared_ptr<State> state_;
  friend class StorageWatch;
};

/// A handle that does not keep its storage alive.
class StorageWatch {
 public:
  StorageWatch() = default;
  explicit StorageWatch(const Storage& storage) : state_(storage.state_) {}
  /// The storage, or an empty handle when it is gone.
  Storage lock() const;

 private:
  std::weak_ptr<Storage::State> state_;
};

class Accelerator;  // device/accelerator.h
class Event;        // device/stream.h

enum class Kind : std::uint8_t { cpu, cuda, meta };

/// One rank's compute device: its threads, its memory, its ledger. Owned by the engine (or a test);
/// everything that allocates holds a reference, so it outlives them. Allocation is safe from any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual Kind kind() const = 0;
  /// The device as one that has queues of work beside the calling thread; null where work is done on return:
  /// on processors, and on meta devices whatever they stand for.
  virtual Accelerator* accelerator() { return nullptr; }

  /// Uninitialised memory of the device or host tier, charged to it. Throws Error{memory} at the ledger's
  /// limit or when the system has no more. (On a CPU both are the same memory under two accounts, so that a
  /// limit on one of them lets the machine play a small accelerator beside a large host.)
  virtual Storage allocate(std::size_t bytes, Category category, Tier tier = Tier::device) = 0;

  /// Where the processor may read and write memory of this device itself: the device tier on CPUs, the host
  /// tier beside an accelerator. Memory that belongs to nobody's storage counts as the host's everywhere.
  virtual Tier processor_tier() const { return Tier::device; }
  /// Whether the device tier is a memory beside the processor's, which that does not read: an accelerator's,
  /// or a meta device's that stands for one.
  bool has_own_memory() const { return processor_tier() != Tier::device; }

  /// Copies bytes between any two memories of this rank, the device's and the host's, after all work that the
  /// device was given before and ahead of all that it is given later. The call may return earlier where both
  /// lie in memory that this device allocated or pinned, which may then be freed but not written; what was
  /// copied to the host may be read after synchronize(). Other memory is done with on return.
  virtual void copy(void* to, const void* from, std::size_t bytes);
  /// Sets bytes of the device or host tier to zero, in the same order.
  virtual void zero(void* data, std::size_t bytes);
  /// Page-locks host memory of others until the handle goes, so that copies are fast and kernels reach it. An
  /// empty handle where the system does not allow it, and on CPUs.
  virtual std::shared_ptr<void> pin(void* data, std::size_t bytes);

  /// Waits until everything submitted to the device is done. Nothing to do on CPUs.
  virtual void synchronize() {}
  /// After everything that the device was given so far; empty where that is done on return.
  virtual Event record();
  /// The deadline of a wait for this device that begins now.
  virtual Deadline deadline() const;
  /// Throws what work that has ended by now found wrong with its data. Does not wait.
  virtual void check() {}
  /// Ends a sequence of work that comes again step for step, such as a block's pass: a device that defers
  /// work to run a whole sequence as one (CUDA graphs) hands over what it has. Elsewhere nothing to do.
  virtual void end_sequence() {}

  virtual Arena& arena() = 0;
  virtual Ledger& ledger() = 0;
  /// Bytes that allocate() has from the system for the processor's tiers and that are in no block now:
  /// free for blocks to come, and resident all the same. Beside the ledger, and subject to no limit.
  virtual std::uint64_t unused_bytes() const { return 0; }
};

/// A CPU arena of `threads` threads posing as a device. Its memory only grows and goes back as a whole (page
/// faults cost more than the copies they serve); what is freed serves any later block (heap/heap.h). With
/// `cores`, its threads and the calling one stay on these (Arena).
std::shared_ptr<Device> make_cpu_device(int threads, std::vector<int> cores = {});

/// A device that computes nothing and holds nothing: it charges the ledger as a CPU device of `threads`
/// threads would and gives out addresses that read as zero and take no memory until they are written. A
/// training step run on it tells what a real one will need.
std::shared_ptr<Device> make_meta_device(int threads);

/// The same with the ledger of a GPU beside a processor of `threads` threads; it needs no GPU here.
std::shared_ptr<Device> make_meta_gpu(int threads);

}  // namespace sherd::device
