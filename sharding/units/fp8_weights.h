#pragma once

#include <memory>
#include <vector>

#include "sharding/segment.h"

namespace sherd::sharding {

/// Weights of one segment on their way between ranks in FP8 (SegmentKey::fp8): a byte an element. Each rank
/// makes the codes of what it holds, with scales that all have agreed on, so that what arrives is what the
/// products make of the whole weight themselves (tensor/formats/fp8_code.h says why). Used from the rank's
/// thread.
class Fp8Weights {
 public:
  explicit Fp8Weights(const Segment& segment);

  /// The values have changed: the scales are to be agreed on again. At the same point on all ranks.
  void forget() { agreed_ = false; }
  /// The codes of this rank's shard, whose values are `own`, into `codes`, uint8. Collective where the scales
  /// are not known: the ranks of the shard group find the largest magnitudes together.
  void encode(const Tensor& own, const Tensor& codes);
  /// Writes the values that the codes of the whole segment stand for into `full`. Padding is left as it is.
  void decode(const Tensor& codes, const Tensor& full) const;

 private:
  Tensor scales_of(std::size_t slot) const { return scales_.range(begins_[slot], begins_[slot + 1]); }
  tensor::Fp8Range range_of(const Piece& piece) const;
  tensor::Fp8Rule rule_of(std::size_t slot) const;
  void agree(const Tensor& own);

  const Segment& segment_;
  std::vector<std::int64_t> begins_{0};  ///< of each parameter's scales
  Tensor scales_;
  bool agreed_ = false;
};

}  // namespace sherd::sharding
