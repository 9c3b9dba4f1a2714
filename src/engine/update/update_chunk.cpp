#include "engine/update/update_chunk.h"

#include <algorithm>

#include "engine/update/rules/whole_matrices.h"

namespace sherd::engine {

using sharding::Segment;

UpdateView UpdateView::part(std::int64_t from, std::int64_t to) const {
  const auto range = [&](const tensor::Tensor& x) {
    return x.defined() ? x.range(from - begin, to - begin) : tensor::Tensor();
  };
  const auto blocks = [&](const tensor::Tensor& x) {
    constexpr std::int64_t block = optim::quantized_block;
    return x.defined() ? x.range((from - begin) / block, (to - begin + block - 1) / block) : tensor::Tensor();
  };
  UpdateView out{segment, from, range(parameters), range(gradients), range(masters), {}, {}};
  for (const tensor::Tensor& moment : moments) out.moments.push_back(range(moment));
  for (const tensor::Tensor& each : scales) out.scales.push_back(blocks(each));
  return out;
}

namespace {

/// Chunks begin and end at whole pages in the narrowest dtype of a state.
constexpr std::int64_t chunk_grain = 4096;
/// More elements per chunk gain nothing: transfers are long enough, and the buffers would only grow.
constexpr std::int64_t most_per_chunk = std::int64_t{1} << 22;

bool has_stored_state(const Segment& segment) {
  bool stored = segment.parameters().stored() || segment.masters().stored();
  for (const sharding::StateBuffer& moment : segment.moments()) stored = stored || moment.stored();
  return stored;
}

/// Elements per chunk where `all` are cut into as few as can be. Of equal size, for a small one at the end
/// would take a buffer while next to nothing is read ahead or written behind through it.
std::int64_t even_step(std::int64_t all, std::int64_t most) {
  const std::int64_t count = std::max<std::int64_t>(1, (all + most - 1) / most);
  const std::int64_t step = (all + count - 1) / count;
  return (step + chunk_grain - 1) / chunk_grain * chunk_grain;
}

}  // namespace

std::span<const optim::Phase> phases_of(const Segment& segment, std::span<const optim::Description> rules,
                                        std::int64_t step) {
  if (rules.empty()) return UpdateChunk::elementwise_only;
  const optim::Description& rule = rules[static_cast<std::size_t>(segment.key().rule)];
  if (!rule.exchanges_momentum(step)) return rule.phases;
  const std::span<const optim::Phase> frozen = rule.frozen_phases;
  return segment.can_exchange_momentum() ? frozen : frozen.subspan(2);
}

namespace {

bool takes_matrices(std::span<const optim::Phase> phases) {
  return std::find(phases.begin(), phases.end(), optim::Phase::whole_parameters) != phases.end();
}

/// Numbers batches of neighbouring segments whose matrices lie on the same ranks, cut alike. One is full when
/// its work can be dealt out evenly: as the ranks times its largest matrix.
class BatchNumbers {
 public:
  int next(const Segment& segment) {
    const sharding::RankGroups& groups = segment.groups();
    if (full_ || &groups.holders_of_all() != group_ || groups.shards() != shards_ ||
        segment.optimizer_replicated() != replicated_)
      ++number_, work_ = largest_ = 0;
    group_ = &groups.holders_of_all(), shards_ = groups.shards();
    replicated_ = segment.optimizer_replicated();
    for (const Matrix& matrix : matrices_of(segment))
      work_ += matrix.work(), largest_ = std::max(largest_, matrix.work());
    full_ = work_ >= group_->size() * largest_;
    return number_;
  }

 private:
  const comm::Communicator* group_ = nullptr;
  bool full_ = false, replicated_ = false;
  int number_ = 0, shards_ = 0;
  double work_ = 0, largest_ = 0;
};

}  // namespace

std::vector<UpdateChunk> cut_update(const std::vector<Segment*>& segments, std::int64_t most_elements,
                                    std::span<const optim::Description> rules, std::int64_t step) {
  const std::int64_t most =
      std::max(chunk_grain, std::min(most_elements, most_per_chunk) / chunk_grain * chunk_grain);
  std::vector<UpdateChunk> chunks;
  BatchNumbers batches;
  for (Segment* segment : segments) {
    const bool stored = has_stored_state(*segment);
    const std::span<const optim::Phase> phases = phases_of(*segment, rules, step);
    const std::int64_t end = segment->update_end(), all = end - segment->update_begin();
    const int batch = takes_matrices(phases) ? batches.next(*segment) : 0;
    const std::int64_t each = stored ? even_step(all, most) : all;
    for (std::int64_t at = segment->update_begin(); at < end; at += each)
      chunks.push_back({segment, at, std::min(at + each, end), stored, at + each >= end, phases, batch});
  }
  return chunks;
}

}  // namespace sherd::engine
