#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "sharding/state.h"

namespace sherd::sharding {

/// Memory of the host tier for states as they are at one moment. Used twice in the same way: at first it only
/// counts, then it gives out one block.
class FrozenMemory {
 public:
  FrozenMemory() = default;  ///< counts
  /// Gives out `storage`, of at least bytes() of one that counted.
  explicit FrozenMemory(device::Storage storage) : counts_(false), storage_(std::move(storage)) {}

  bool counts() const { return counts_; }
  std::size_t bytes() const { return used_; }
  /// Undefined while it counts.
  Tensor take(std::int64_t numel, DType dtype);
  /// Notes that Frozen::read() will give so many elements that are not in memory; most_read() is the largest
  /// of these numbers.
  void note_reading(std::int64_t elements) { most_read_ = std::max(most_read_, elements); }
  std::int64_t most_read() const { return most_read_; }

 private:
  bool counts_ = true;
  device::Storage storage_;
  std::size_t used_ = 0;
  std::int64_t most_read_ = 0;
};

/// Threads and memory with which another thread than the rank's reads frozen elements.
class FrozenReading {
 public:
  FrozenReading(Arena& threads, Tensor low, Tensor high)
      : arena(threads), low_(std::move(low)), high_(std::move(high)) {}

  Arena& arena;  ///< used by this thread alone

  /// Room for `count` elements.
  Tensor in_low(std::int64_t count, DType dtype) const { return view(low_, count, dtype); }
  Tensor in_high(std::int64_t count, DType dtype) const { return view(high_, count, dtype); }

 private:
  static Tensor view(const Tensor& of, std::int64_t count, DType dtype) {
    return Tensor::view_of(of.storage(), of.byte_offset(), {count}, dtype);
  }
  Tensor low_, high_;  ///< memory of the processor, each for FrozenMemory::most_read() elements of two bytes
};

/// Elements of a state as they were at one moment: copied to host memory; or, of a state on NVMe, still there
/// (offload::DeferredRead), so that its memory does not grow. Must not outlive what it was made from.
struct Frozen {
  Tensor memory;  ///< all of them, on a device beside the processor once that is through; or undefined, and
  /// reads them into memory of the processor. Once, from any thread. Throws the store's errors.
  std::function<void(const Tensor& to, FrozenReading& with)> read;

  /// As StateBuffer::read(): `count` elements from `begin` on. Nothing while `memory` counts.
  static Frozen of(device::Device& device, const StateBuffer& state, std::int64_t begin, std::int64_t count,
                   FrozenMemory& memory);
  /// All elements of any tensor of the device.
  static Frozen of(device::Device& device, const Tensor& from, FrozenMemory& memory);

  /// Where the processor finds the elements: `memory`, or `to` after a read.
  Tensor in(const Tensor& to, FrozenReading& with) const;
};

}  // namespace sherd::sharding
