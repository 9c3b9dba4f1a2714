#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "device/ledger.h"

namespace sherd::device {

/// Deals out parts of one region that grows at its end, by offsets; knows no memory. A block takes the
/// smallest hole that holds it, of equal ones the lowest ("best fit"; Knuth, TAOCP 1, 2.5), and joins its
/// neighbours when it comes back. So what a training step frees serves requests of any other size, and the
/// region hardly grows beyond what is in use at once. Not thread-safe.
class Heap {
 public:
  /// Blocks start and end on multiples of `granule`; the region grows by multiples of `step`. Powers of two.
  Heap(std::uint64_t granule, std::uint64_t step) : granule_(granule), step_(step) {}

  /// The offset of a block of at least `bytes` bytes; none when no hole holds it.
  std::optional<std::uint64_t> take(std::uint64_t bytes);
  /// By how much the end must move for take(bytes) to succeed; a multiple of the step.
  std::uint64_t missing(std::uint64_t bytes) const;
  /// Moves the end.
  void grow(std::uint64_t bytes);
  /// Takes back what take(bytes) gave.
  void give(std::uint64_t offset, std::uint64_t bytes);

  std::uint64_t size() const { return end_; }
  std::uint64_t free_bytes() const { return free_; }
  /// The bytes of the region that a block of `bytes` bytes takes.
  std::uint64_t rounded(std::uint64_t bytes) const;

 private:
  void add_hole(std::uint64_t begin, std::uint64_t end);
  void remove_hole(std::map<std::uint64_t, std::uint64_t>::iterator hole);

  const std::uint64_t granule_, step_;
  std::uint64_t end_ = 0, free_ = 0;
  std::map<std::uint64_t, std::uint64_t> holes_;               // begin to end
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // size and begin of each
};

/// The heaps that live apart, so that a block that stays does not split the room of those that come and go:
/// small blocks; of larger ones those of a pass, which are gone when it ends, and all else.
enum class HeapOf : std::uint8_t { small, passing, lasting };
inline constexpr int heap_count = 3;
inline HeapOf heap_of(std::size_t bytes, Category category) {
  if (bytes < (std::size_t{64} << 10)) return HeapOf::small;
  const bool passes = category == Category::activations || category == Category::workspace;
  return passes ? HeapOf::passing : HeapOf::lasting;
}
/// A heap of a CPU device: small blocks lie on cache lines, others on pages, for which it asks for whole huge
/// pages.
inline Heap make_heap(HeapOf which) {
  return which == HeapOf::small ? Heap(64, std::uint64_t{256} << 10) : Heap(4096, std::uint64_t{2} << 20);
}

}  // namespace sherd::device
