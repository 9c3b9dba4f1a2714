#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device/heap/heap.h"

namespace sherd::device {

/// Memory of the processor, dealt out by heaps. It grows as blocks need it and goes back to the system as a
/// whole. Thread-safe. Shared by a device and every block that it gave out, so that memory may outlive the
/// device object.
class HeapMemory {
 public:
#if defined(__SANITIZE_THREAD__)
  static constexpr std::uint64_t most_room = std::uint64_t{1} << 32;  // of ThreadSanitizer's few
#else
  static constexpr std::uint64_t most_room = std::uint64_t{1} << 40;  // no machine has as much memory
#endif
  /// `room`: addresses that one heap may grow over. Where the system has fewer in a row, another heap begins
  /// elsewhere.
  explicit HeapMemory(std::uint64_t room = most_room) : room_(room) {}
  ~HeapMemory();
  HeapMemory(const HeapMemory&) = delete;
  HeapMemory& operator=(const HeapMemory&) = delete;

  /// At least `bytes` bytes on a boundary of 64; null when the system has no more.
  std::byte* take(std::size_t bytes, HeapOf kind);
  /// Takes back what take(bytes, …) gave.
  void give(std::byte* data, std::size_t bytes) noexcept;

  /// Bytes that it has from the system and that are in no block.
  std::uint64_t free_bytes() const;

 private:
  struct HeapRegion {
    std::byte* base;
    HeapOf kind;
    Heap heap;
  };
  std::byte* take_from_holes(std::size_t bytes, HeapOf kind);
  static void add(HeapRegion& region, std::uint64_t bytes);
  static bool extend(HeapRegion& region, std::size_t bytes);
  bool begin_region(std::size_t bytes, HeapOf kind);

  const std::uint64_t room_;
  mutable std::mutex mutex_;
  std::vector<HeapRegion> regions_;  // guarded by mutex_; of each kind only the last grows
};

}  // namespace sherd::device
