#include "comm/processes/window_pool.h"

#include <sys/mman.h>

#include <algorithm>

namespace sherd::comm {
namespace {

std::size_t align_of(std::size_t bytes) {
  return bytes >= shared_page ? shared_page : 64;
}
/// Blocks take whole lines, so that neighbours share none.
std::size_t extent_of(std::size_t bytes) {
  return std::max<std::size_t>(64, (bytes + 63) / 64 * 64);
}

}  // namespace

void WindowRegistry::add(std::uint64_t region, std::vector<int> world_ranks, std::vector<std::byte*> parts,
                         int own, std::size_t bytes) {
  auto entry =
      std::make_shared<WindowRegion>(WindowRegion{region, std::move(world_ranks), std::move(parts), bytes});
  std::lock_guard lock(mutex_);
  by_id_[region] = entry;
  by_own_part_[entry->parts[static_cast<std::size_t>(own)]] = entry;
}

Address WindowRegistry::locate(const std::byte* data, std::size_t bytes,
                               const std::vector<int>& world_ranks) const {
  std::lock_guard lock(mutex_);
  auto it = by_own_part_.upper_bound(data);
  if (it == by_own_part_.begin()) return {};
  --it;
  const WindowRegion& region = *it->second;
  const auto offset = static_cast<std::size_t>(data - it->first);
  if (offset + bytes > region.bytes) return {};
  for (const int r : world_ranks)
    if (std::find(region.world_ranks.begin(), region.world_ranks.end(), r) == region.world_ranks.end())
      return {};
  return {region.id, offset};
}

std::byte* WindowRegistry::resolve(int world_rank, const Address& address) const {
  std::lock_guard lock(mutex_);
  const auto it = by_id_.find(address.region);
  require(it != by_id_.end(), "a peer named a shared window that this rank does not have");
  const WindowRegion& region = *it->second;
  const auto member = std::find(region.world_ranks.begin(), region.world_ranks.end(), world_rank);
  require(member != region.world_ranks.end(), "a peer named a shared window that it has no part in");
  return region.parts[static_cast<std::size_t>(member - region.world_ranks.begin())] + address.offset;
}

WindowPart::WindowPart(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {
  if (bytes) gaps_[0] = bytes;
}

WindowPart::~WindowPart() {
  // The mapping stays (see WindowRegistry); only its memory goes back.
  madvise(data_, bytes_, MADV_REMOVE);
}

std::map<std::size_t, std::size_t>::const_iterator WindowPart::find(std::size_t bytes,
                                                                    std::size_t& begin) const {
  const std::size_t align = align_of(bytes), extent = extent_of(bytes);
  for (auto it = gaps_.begin(); it != gaps_.end(); ++it) {
    begin = (it->first + align - 1) / align * align;
    if (begin + extent <= it->first + it->second) return it;
  }
  return gaps_.end();
}

bool WindowPart::fits(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  std::size_t begin = 0;
  return find(bytes, begin) != gaps_.end();
}

std::byte* WindowPart::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  std::size_t begin = 0;
  const auto it = find(bytes, begin);
  if (it == gaps_.end()) return nullptr;
  const auto [gap, length] = *it;
  const std::size_t end = begin + extent_of(bytes);
  gaps_.erase(gap);
  if (begin > gap) gaps_[gap] = begin - gap;
  if (end < gap + length) gaps_[end] = gap + length - end;
  return data_ + begin;
}

void WindowPart::give(std::byte* block, std::size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  std::size_t begin = static_cast<std::size_t>(block - data_), length = extent_of(bytes);
  auto next = gaps_.lower_bound(begin);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) begin = before->first, length += before->second;
  }
  if (next != gaps_.end() && block - data_ + static_cast<std::ptrdiff_t>(extent_of(bytes)) ==
                                 static_cast<std::ptrdiff_t>(next->first)) {
    length += next->second;
    gaps_.erase(next);
  }
  gaps_[begin] = length;
}

}  // namespace sherd::comm
