#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optim/description.h"
#include "sharding/segment.h"

namespace sherd::engine {

/// A stretch of a segment's update range that is updated at once: flat elements [begin, end).
struct UpdateChunk {
  sharding::Segment* segment;
  std::int64_t begin, end;
  bool stored;  ///< some of its states live on NVMe and pass through a buffer
  bool last;    ///< ends its segment
  /// The phases of its rule, in order; they live with the rules.
  std::span<const optim::Phase> phases = elementwise_only;
  /// Segments whose matrices are exchanged together have a number, from 1 on; others, 0.
  int batch = 0;

  static constexpr optim::Phase elementwise_only[] = {optim::Phase::elementwise};
};

/// All states of a stretch of a segment in memory, from flat element `begin` on; `masters` as the segment's
/// form says, undefined where the parameters are the masters.
struct UpdateView {
  const sharding::Segment* segment = nullptr;
  std::int64_t begin = 0;
  tensor::Tensor parameters, gradients, masters;
  std::vector<tensor::Tensor> moments;
  std::vector<tensor::Tensor> scales;  ///< by moment: of its blocks, where it is in codes; else undefined

  std::int64_t end() const { return begin + gradients.numel(); }
  /// The view of flat elements [from, to) of the chunk.
  UpdateView part(std::int64_t from, std::int64_t to) const;
};

/// The phases of a segment's update in step number `step` by its rule, one of `rules` (SegmentKey::rule);
/// they live with these.
std::span<const optim::Phase> phases_of(const sharding::Segment& segment,
                                        std::span<const optim::Description> rules, std::int64_t step);

/// The update ranges of `segments`, which `rules` update in step number `step`, in order; those with states
/// on NVMe in as few equal chunks of at most `most_elements` as can be, rounded to whole pages of every
/// dtype. Neighbours with matrices form batches. No rules: each is one pass over the elements.
std::vector<UpdateChunk> cut_update(const std::vector<sharding::Segment*>& segments,
                                    std::int64_t most_elements,
                                    std::span<const optim::Description> rules = {}, std::int64_t step = 1);

}  // namespace sherd::engine
