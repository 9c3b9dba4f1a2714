#include "tensor/slice.h"

#include <utility>

namespace sherd::tensor {
namespace {

/// Checked and joined.
std::vector<Range> joined(const std::vector<Range>& ranges, std::int64_t extent) {
  std::vector<Range> out;
  std::int64_t at = 0;
  for (const Range& range : ranges) {
    require(range.begin >= at && range.end >= range.begin && range.end <= extent,
            "blocks of a slice ascend within ", extent, " indices without overlap, and [", range.begin, ", ",
            range.end, ") follows index ", at);
    at = range.end;
    if (range.size() == 0) continue;
    if (!out.empty() && out.back().end == range.begin)
      out.back().end = range.end;
    else
      out.push_back(range);
  }
  return out;
}

std::int64_t size_of_all(const std::vector<Range>& ranges) {
  std::int64_t size = 0;
  for (const Range& range : ranges) size += range.size();
  return size;
}

/// The block with the `local`-th index of a dimension, and that index of the whole one.
std::pair<const Range*, std::int64_t> block_at(const std::vector<Range>& ranges, std::int64_t local) {
  const Range* block = ranges.data();
  for (; local >= block->size(); ++block) local -= block->size();
  return {block, block->begin + local};
}

}  // namespace

Slice Slice::whole(const Shape& logical) {
  Blocks blocks;
  for (const std::int64_t extent : logical.dims()) blocks.push_back({{0, extent}});
  return Slice(logical, std::move(blocks));
}

Slice::Slice(const Shape& logical, Blocks blocks) : logical_(logical), blocks_(std::move(blocks)) {
  require(blocks_.size() == static_cast<std::size_t>(logical.rank()), "a slice of ", logical.str(),
          " has blocks of ", blocks_.size(), " dimensions");
  std::vector<std::int64_t> extents;
  for (int axis = 0; axis < logical.rank(); ++axis) {
    std::vector<Range>& ranges = blocks_[static_cast<std::size_t>(axis)];
    ranges = joined(ranges, logical[axis]);
    extents.push_back(size_of_all(ranges));
    if (extents.back() != logical[axis]) axis_ = axis;
  }
  shape_ = Shape(extents);
  for (int axis = axis_ + 1; axis < logical.rank(); ++axis) inner_ *= logical[axis];
}

std::string Slice::str() const {
  std::string out;
  for (const std::vector<Range>& ranges : blocks_) {
    out += out.empty() ? "[" : ", ";
    for (const Range& range : ranges)
      out += cat(&range == ranges.data() ? "" : "+", range.begin, ":", range.end);
  }
  return cat(out.empty() ? "[" : out, "] of ", logical_.str());
}

Slice::Run Slice::run_at(std::int64_t local, std::int64_t end) const {
  if (axis_ < 0) return {local, local, end - local};
  const std::int64_t place = local / inner_, rest = local % inner_;
  const auto [block, index] = block_at(blocks_[static_cast<std::size_t>(axis_)], place % shape_[axis_]);
  std::int64_t outer = place / shape_[axis_], logical = index, stride = logical_[axis_];
  for (int axis = axis_ - 1; axis >= 0; --axis) {
    logical += block_at(blocks_[static_cast<std::size_t>(axis)], outer % shape_[axis]).second * stride;
    outer /= shape_[axis];
    stride *= logical_[axis];
  }
  return {local, logical * inner_ + rest, std::min(end - local, (block->end - index) * inner_ - rest)};
}

std::int64_t Slice::lower_bound(std::int64_t logical) const {
  if (axis_ < 0) return logical;
  std::int64_t after = logical_.numel(), local_after = shape_.numel(), out = 0;
  if (logical >= after) return local_after;
  for (int axis = 0; axis <= axis_; ++axis) {
    if (local_after == 0) return 0;
    after /= logical_[axis];
    local_after /= shape_[axis];
    const std::int64_t index = logical / after;
    logical %= after;
    bool there = false;
    for (const Range& range : blocks_[static_cast<std::size_t>(axis)]) {
      out += std::clamp<std::int64_t>(index - range.begin, 0, range.size()) * local_after;
      there = there || (range.begin <= index && index < range.end);
    }
    if (!there) return out;
  }
  return out + logical;
}

}  // namespace sherd::tensor
