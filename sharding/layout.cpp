#include "sharding/layout.h"

#include <algorithm>

#include "base/error.h"

namespace sherd::sharding {
namespace {
std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
}  // namespace

SegmentLayout::SegmentLayout(std::vector<ParameterPtr> parameters, int ranks, std::int64_t block)
    : parameters_(std::move(parameters)), ranks_(ranks), block_(block) {
  require(ranks >= 1, "a segment is laid out over at least one rank");
  require(block > 0 && block % layout_alignment == 0, "a segment's blocks are multiples of ",
          layout_alignment, " elements, not ", block);
  std::int64_t end = 0;
  for (const ParameterPtr& parameter : parameters_) {
    offsets_.push_back(end);
    payload_ += parameter->numel();
    end = round_up(end + parameter->numel(), block);
  }
  shard_ = round_up(end, ranks * block) / ranks;
}

std::vector<Piece> SegmentLayout::pieces(std::int64_t begin, std::int64_t end) const {
  std::vector<Piece> out;
  const auto first = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
  std::size_t slot = first == offsets_.begin() ? 0 : static_cast<std::size_t>(first - offsets_.begin()) - 1;
  for (; slot < offsets_.size() && offsets_[slot] < end; ++slot) {
    const std::int64_t from = std::max(begin, offsets_[slot]);
    const std::int64_t to = std::min(end, offsets_[slot] + parameters_[slot]->numel());
    if (from < to) out.push_back({slot, from - offsets_[slot], from, to - from});
  }
  return out;
}

}  // namespace sherd::sharding
