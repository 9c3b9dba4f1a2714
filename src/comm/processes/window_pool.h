#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/exchange/descriptor.h"

namespace sherd::comm {

/// The shared windows of this process, whichever group made them: memory of a group serves its parts too.
/// Thread-safe (a lock guards all members). Windows stay mapped until the process ends, for peers may still
/// need their parts; a part whose blocks are all free and whose group is gone returns its pages to the
/// system.
class WindowRegistry {
 public:
  /// `parts[i]` is where the part of world rank `world_ranks[i]` is seen here.
  void add(std::uint64_t region, std::vector<int> world_ranks, std::vector<std::byte*> parts, int own,
           std::size_t bytes);

  /// Where peers find these bytes; hidden unless they lie in a window that all of `world_ranks` have.
  Address locate(const std::byte* data, std::size_t bytes, const std::vector<int>& world_ranks) const;
  std::byte* resolve(int world_rank, const Address& address) const;

 private:
  struct WindowRegion {
    std::uint64_t id = 0;
    std::vector<int> world_ranks;
    std::vector<std::byte*> parts;
    std::size_t bytes = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<WindowRegion>> by_id_;
  std::map<const std::byte*, std::shared_ptr<WindowRegion>> by_own_part_;
};

/// This rank's part of one window, cut into blocks, first fit. Thread-safe.
class WindowPart {
 public:
  WindowPart(std::byte* data, std::size_t bytes);
  ~WindowPart();
  WindowPart(const WindowPart&) = delete;
  WindowPart& operator=(const WindowPart&) = delete;

  /// Null when no gap is large enough. Blocks begin on 64 bytes, those of a page or more on pages.
  std::byte* take(std::size_t bytes);
  void give(std::byte* block, std::size_t bytes) noexcept;
  /// True when take(bytes) would succeed.
  bool fits(std::size_t bytes) const;

 private:
  /// The gap to take from and where in it the block would begin.
  std::map<std::size_t, std::size_t>::const_iterator find(std::size_t bytes, std::size_t& begin) const;
  std::byte* data_;
  std::size_t bytes_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> gaps_;  ///< offset to length; guarded by mutex_
};

}  // namespace sherd::comm
