#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "device/stream.h"

namespace sherd::device {

/// Where a BlockCache gets its memory. Thread-safe.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// The size of the block that serves a request: larger, so that freed blocks fit later requests.
  virtual std::size_t size_for(std::size_t bytes) const;
  /// `size` bytes, or null when there are no more.
  virtual std::byte* obtain(std::size_t size) = 0;
  virtual void give_back(std::byte* data, std::size_t size) noexcept = 0;
  /// Called after the cache gave back what it kept, and before it asks once more: lets that memory return to
  /// where others find it.
  virtual void settle() {}
};

/// Multiples of 64 bytes up to a page, above it at most 1/8 more than was asked for.
std::size_t size_class(std::size_t bytes);

/// Which of the kept blocks of a size serves the next request.
enum class Reuse : std::uint8_t {
  latest,  ///< the one that the processor's caches still hold
  lowest,  ///< the one at the lowest address: requests and releases in the same order meet the same addresses
           ///< each time
};

/// Keeps freed blocks by size for later requests. Thread-safe. Shared by a device and every block it gave
/// out, so that memory may outlive the device object.
class BlockCache {
 public:
  /// Marks the point of the device's work from which on a block that is given back now may be written by the
  /// processor.
  using Fence = std::function<Event()>;

  /// A block is reused at once: right where its users run in the order of the calls (one compute stream, or
  /// the processor itself).
  explicit BlockCache(std::unique_ptr<BlockSource> source, Reuse reuse = Reuse::latest);
  /// The oldest block of a size is reused when its fence has been reached; take() waits for fences,
  /// `fence_seconds` at most, before it reports that memory is out.
  BlockCache(std::unique_ptr<BlockSource> source, Fence fence, double fence_seconds = 0);
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// At least `bytes` bytes. When the source has none left, everything kept is given back before it is asked
  /// again, at first what is past its fence, then, having waited, the rest. Null when that does not help.
  /// Throws Error{comm} when a fence is not reached in time.
  std::byte* take(std::size_t bytes);
  /// Takes back what take(bytes) gave.
  void give(std::byte* data, std::size_t bytes) noexcept;
  /// Gives back to the source what is kept and past its fence.
  void trim();
  /// In blocks that nobody holds.
  std::size_t kept_bytes() const;

  /// The size of the block that serves a request.
  std::size_t size_for(std::size_t bytes) const { return source_->size_for(bytes); }

 private:
  struct FreeBlock {
    std::byte* data;
    Event fence;
  };
  std::byte* take_kept(std::size_t size);
  bool wait_for_fences();
  void trim_locked(bool all);

  std::unique_ptr<BlockSource> source_;
  const Reuse reuse_ = Reuse::latest;
  const Fence fence_;
  const double fence_seconds_ = 0;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::deque<FreeBlock>>
      free_;                    // guarded by mutex_; the next to serve last, with a fence first
  std::size_t kept_bytes_ = 0;  // guarded by mutex_
};

}  // namespace sherd::device
