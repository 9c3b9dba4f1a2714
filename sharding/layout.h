#pragma once

#include <cstdint>
#include <vector>

#include "autograd/parameter.h"

namespace sherd::sharding {

using autograd::ParameterPtr;

/// Parameters begin, and shards end, at multiples of this many elements. 64 keeps every parameter on a cache
/// line in every dtype, and is the block of Kernels::sum_of_squares, so that a norm does not depend on the
/// layout.
inline constexpr std::int64_t layout_alignment = 64;

/// A run of one parameter's elements inside a flat segment.
struct Piece {
  std::size_t slot;              ///< which parameter of the segment
  std::int64_t parameter_begin;  ///< first element within the parameter
  std::int64_t flat_begin;       ///< the same element within the segment
  std::int64_t count;
};

/// Where each parameter of a flat segment lies, and which part each rank owns. Pure arithmetic: holds no
/// memory.
///
/// The segment is padded to a multiple of ranks·block; rank r owns [r·shard, (r+1)·shard), so a parameter may
/// straddle ranks (ZeRO, Rajbhandari et al. 2020, §5).
class SegmentLayout {
 public:
  /// `block`: a multiple of layout_alignment; the largest block of elements that a format of the segment's
  /// states keeps together. Parameters begin, and shards end, at multiples of it.
  SegmentLayout(std::vector<ParameterPtr> parameters, int ranks, std::int64_t block = layout_alignment);

  const std::vector<ParameterPtr>& parameters() const { return parameters_; }
  std::int64_t offset(std::size_t slot) const { return offsets_[slot]; }
  std::int64_t payload() const { return payload_; }  ///< sum of the parameters' elements
  std::int64_t padded() const { return shard_ * ranks_; }
  std::int64_t shard() const { return shard_; }
  int ranks() const { return ranks_; }
  std::int64_t block() const { return block_; }

  /// The runs of parameters within flat elements [begin, end), in order.
  std::vector<Piece> pieces(std::int64_t begin, std::int64_t end) const;

 private:
  std::vector<ParameterPtr> parameters_;
  std::vector<std::int64_t> offsets_;
  std::int64_t payload_ = 0;
  std::int64_t shard_ = 0;
  int ranks_ = 1;
  std::int64_t block_ = layout_alignment;
};

}  // namespace sherd::sharding
