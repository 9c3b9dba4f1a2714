#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace sherd::tensor {

/// Indices [begin, end) of one dimension.
struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Which part of a logical tensor somebody holds: per dimension the blocks of indices that are there (Q, K
/// and V of a model-parallel rank's heads, say), which follow each other without gaps in the local tensor.
/// Pure arithmetic. Flat indices are row-major: *local* ones count the slice's elements, *logical* ones the
/// whole tensor's, and one grows with the other.
class Slice {
 public:
  /// Ranges of each dimension in ascending order, apart from each other.
  using Blocks = std::vector<std::vector<Range>>;

  /// A whole scalar.
  Slice() = default;
  /// All of a tensor of that shape.
  static Slice whole(const Shape& logical);
  /// Neighbouring blocks are joined, empty ones left out, so that equal slices compare equal. Throws
  /// Error{usage} unless there is a list for each dimension, of ranges that are within it and ascend without
  /// overlap.
  Slice(const Shape& logical, Blocks blocks);

  const Shape& logical() const { return logical_; }
  const Blocks& blocks() const { return blocks_; }
  /// The slice as a tensor of its own.
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return shape_.numel(); }
  bool is_whole() const { return shape_ == logical_; }
  bool operator==(const Slice& other) const { return logical_ == other.logical_ && blocks_ == other.blocks_; }
  std::string str() const;  ///< "[0:4, 0:8+16:24] of [8, 32]"

  /// `count` elements that follow each other in the local tensor and in the logical one.
  struct Run {
    std::int64_t local, logical, count;
  };
  /// The run that begins at flat local index `local` and ends with its block, by `end` at the latest; all of
  /// a whole slice is one. 0 <= local < end <= numel().
  Run run_at(std::int64_t local, std::int64_t end) const;
  /// Calls visit(local_begin, logical_begin, count) for the runs of local elements [begin, end), in order.
  template <class Visit>
  void for_each_run(std::int64_t begin, std::int64_t end, const Visit& visit) const {
    for (std::int64_t at = begin; at < end;) {
      const Run run = run_at(at, end);
      visit(run.local, run.logical, run.count);
      at += run.count;
    }
  }
  /// The number of the slice's elements before flat logical index `logical`, which may be the logical numel:
  /// the local index of the first that is not before it.
  std::int64_t lower_bound(std::int64_t logical) const;

 private:
  Shape logical_, shape_;
  Blocks blocks_;
  std::int64_t inner_ = 1;  ///< elements under one index of axis_; all axes beyond it are whole
  int axis_ = -1;           ///< the last that is not whole; -1: none
};

/// Calls visit(a_begin, b_begin, count) for the runs of elements that are both among local elements
/// [begin, end) of `a` and [b_begin, b_end) of `b`, slices of one logical tensor, in order.
template <class Visit>
void for_each_common_run(const Slice& a, std::int64_t begin, std::int64_t end, const Slice& b,
                         std::int64_t b_begin, std::int64_t b_end, const Visit& visit) {
  a.for_each_run(begin, end, [&](std::int64_t at, std::int64_t logical, std::int64_t count) {
    b.for_each_run(std::max(b_begin, b.lower_bound(logical)), std::min(b_end, b.lower_bound(logical + count)),
                   [&](std::int64_t b_at, std::int64_t b_logical, std::int64_t common) {
                     visit(at + b_logical - logical, b_at, common);
                   });
  });
}

}  // namespace sherd::tensor
