#include "device/heap/heap.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace sherd::device {
namespace {

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::uint64_t Heap::rounded(std::uint64_t bytes) const {
  return round_up(std::max<std::uint64_t>(bytes, 1), granule_);
}

std::optional<std::uint64_t> Heap::take(std::uint64_t bytes) {
  const std::uint64_t size = rounded(bytes);
  const auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end()) return std::nullopt;
  const std::uint64_t begin = best->second, end = begin + best->first;
  remove_hole(holes_.find(begin));
  if (begin + size < end) add_hole(begin + size, end);
  return begin;
}

std::uint64_t Heap::missing(std::uint64_t bytes) const {
  const std::uint64_t size = rounded(bytes);
  if (const auto best = by_size_.lower_bound({size, 0}); best != by_size_.end()) return 0;
  const bool open = !holes_.empty() && holes_.rbegin()->second == end_;
  return round_up(size - (open ? end_ - holes_.rbegin()->first : 0), step_);
}

void Heap::grow(std::uint64_t bytes) {
  const std::uint64_t begin = end_;
  end_ += bytes;
  add_hole(begin, end_);
}

void Heap::give(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + rounded(bytes);
  const auto next = holes_.lower_bound(offset);
  const bool overlaps = (next != holes_.end() && next->first < end) ||
                        (next != holes_.begin() && std::prev(next)->second > offset);
  require(end <= end_ && !overlaps, "a block is given back that is not in use");
  add_hole(offset, end);
}

void Heap::add_hole(std::uint64_t begin, std::uint64_t end) {
  if (begin == end) return;
  free_ += end - begin;
  if (const auto next = holes_.find(end); next != holes_.end()) {
    end = next->second;
    free_ += end - next->first;
    remove_hole(next);
  }
  const auto after = holes_.lower_bound(begin);
  if (after != holes_.begin() && std::prev(after)->second == begin) {
    const auto before = std::prev(after);
    begin = before->first;
    free_ += before->second - begin;
    remove_hole(before);
  }
  holes_.emplace(begin, end);
  by_size_.emplace(end - begin, begin);
}

void Heap::remove_hole(std::map<std::uint64_t, std::uint64_t>::iterator hole) {
  const auto [begin, end] = *hole;
  free_ -= end - begin;
  by_size_.erase({end - begin, begin});
  holes_.erase(hole);
}

}  // namespace sherd::device
