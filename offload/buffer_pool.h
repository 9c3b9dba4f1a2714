#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "device/ledger.h"
#include "offload/store.h"

namespace sherd::offload {

class PoolMemory;

/// A buffer that is in use, by a handle or by transfers of its memory.
struct BufferLease {
  BufferLease() = default;
  virtual ~BufferLease() = default;
  BufferLease(const BufferLease&) = delete;
  BufferLease& operator=(const BufferLease&) = delete;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// One buffer of a pool, for as long as this handle lives; then it goes back, once no transfer uses it any
/// more.
class Buffer {
 public:
  Buffer() = default;  ///< none
  std::byte* data() const { return lease_ ? lease_->data : nullptr; }
  std::size_t bytes() const { return lease_ ? lease_->bytes : 0; }
  explicit operator bool() const { return lease_ != nullptr; }
  /// Gives the buffer back early.
  void release() { lease_.reset(); }

  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) noexcept = default;

 private:
  explicit Buffer(std::shared_ptr<BufferLease> lease) : lease_(std::move(lease)) {}
  std::shared_ptr<BufferLease> lease_;  // shared with the transfers of this memory
  friend class BufferPool;
};

/// A fixed number of equal host buffers, page aligned, from which a store transfers without a copy. They are
/// registered with the kernel where it allows that; a refusal (memory-lock limits) costs a little speed and
/// is logged once. Fresh buffers hold zeros, used ones what was in them.
///
/// Thread-safe. Buffers may outlive their pool, and both may outlive the store.
class BufferPool {
 public:
  /// `count` buffers of `bytes` bytes. Charges host_bytes(count, bytes) to the host tier under `category`.
  /// Throws Error{memory} at the ledger's limit or when the system has no more.
  BufferPool(Store& store, device::Ledger& ledger, int count, std::size_t bytes, device::Category category);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Lets a second store transfer without a copy too.
  void lend_to(Store& store);

  /// A buffer, or none when none is free.
  Buffer try_acquire();

  int count() const;
  /// The size of each buffer.
  std::size_t bytes() const;
  /// Whether the kernel took the buffers as registered ones, for every store.
  bool registered() const;

  /// Bytes that a pool charges: each buffer is rounded up to whole pages.
  static std::uint64_t host_bytes(int count, std::size_t bytes);

 private:
  std::shared_ptr<PoolMemory> memory_;
};

}  // namespace sherd::offload
