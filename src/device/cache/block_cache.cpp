#include "device/cache/block_cache.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

namespace sherd::device {

std::size_t size_class(std::size_t bytes) {
  constexpr std::size_t alignment = 64;
  if (bytes <= 4096) return (bytes + alignment - 1) / alignment * alignment + (bytes == 0 ? alignment : 0);
  std::size_t step = 512;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

std::size_t BlockSource::size_for(std::size_t bytes) const {
  return size_class(bytes);
}

BlockCache::BlockCache(std::unique_ptr<BlockSource> source, Reuse reuse)
    : source_(std::move(source)), reuse_(reuse) {}

BlockCache::BlockCache(std::unique_ptr<BlockSource> source, Fence fence, double fence_seconds)
    : source_(std::move(source)), fence_(std::move(fence)), fence_seconds_(fence_seconds) {}

BlockCache::~BlockCache() {
  std::lock_guard lock(mutex_);
  trim_locked(true);
}

std::byte* BlockCache::take_kept(std::size_t size) {
  const auto shelf = free_.find(size);
  if (shelf == free_.end() || shelf->second.empty()) return nullptr;
  std::deque<FreeBlock>& blocks = shelf->second;
  std::byte* data = nullptr;
  if (!fence_) {
    data = blocks.back().data;
    blocks.pop_back();
  } else if (blocks.front().fence.reached()) {
    data = blocks.front().data;
    blocks.pop_front();
  } else {
    return nullptr;  // nor are later ones free yet
  }
  kept_bytes_ -= size;
  return data;
}

std::byte* BlockCache::take(std::size_t bytes) {
  const std::size_t size = size_for(bytes);
  {
    std::lock_guard lock(mutex_);
    if (std::byte* data = take_kept(size)) return data;
  }
  if (std::byte* data = source_->obtain(size)) return data;
  trim();
  source_->settle();
  if (std::byte* data = source_->obtain(size)) return data;
  if (!wait_for_fences()) return nullptr;
  {
    std::lock_guard lock(mutex_);
    if (std::byte* data = take_kept(size)) return data;
  }
  trim();
  source_->settle();
  return source_->obtain(size);
}

/// Waits until the device has passed all blocks that are kept now. False when there are none.
bool BlockCache::wait_for_fences() {
  std::vector<Event> last;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [size, blocks] : free_)
      if (!blocks.empty()) last.push_back(blocks.back().fence);
  }
  const Deadline deadline = Deadline::after_seconds(fence_seconds_);
  for (const Event& fence : last) fence.wait(deadline, "the work that still uses freed page-locked memory");
  return !last.empty();
}

void BlockCache::give(std::byte* data, std::size_t bytes) noexcept {
  try {
    FreeBlock kept{data, fence_ ? fence_() : Event()};
    std::lock_guard lock(mutex_);
    const std::size_t size = size_for(bytes);
    std::deque<FreeBlock>& blocks = free_[size];
    const auto at = reuse_ == Reuse::latest
                        ? blocks.end()
                        : std::ranges::lower_bound(blocks, kept.data, std::greater<>(), &FreeBlock::data);
    blocks.insert(at, std::move(kept));
    kept_bytes_ += size;
  } catch (...) {
    // The device has failed, and so may still be using the block: nobody gets it any more.
  }
}

void BlockCache::trim() {
  std::lock_guard lock(mutex_);
  trim_locked(false);
}

void BlockCache::trim_locked(bool all) {
  for (auto& [size, blocks] : free_)
    while (!blocks.empty() && (all || blocks.front().fence.reached())) {
      source_->give_back(blocks.front().data, size);
      blocks.pop_front();
      kept_bytes_ -= size;
    }
}

std::size_t BlockCache::kept_bytes() const {
  std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace sherd::device
