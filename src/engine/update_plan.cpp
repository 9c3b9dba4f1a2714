#include "engine/update_plan.h"

#include <algorithm>
#include <optional>

namespace sherd::engine {

using sharding::Segment;

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
  if (rule.exchanges_momentum(step) && segment.can_exchange_momentum()) return optim::momentum_phases;
  return rule.phases;
}

std::vector<UpdateChunk> cut_update(const std::vector<Segment*>& segments, std::int64_t most_elements,
                                    std::span<const optim::Description> rules, std::int64_t step) {
  const std::int64_t most =
      std::max(chunk_grain, std::min(most_elements, most_per_chunk) / chunk_grain * chunk_grain);
  std::vector<UpdateChunk> chunks;
  for (Segment* segment : segments) {
    const bool stored = has_stored_state(*segment);
    const std::span<const optim::Phase> phases = phases_of(*segment, rules, step);
    const std::int64_t end = segment->update_end(), all = end - segment->update_begin();
    const std::int64_t each = stored ? even_step(all, most) : all;
    for (std::int64_t at = segment->update_begin(); at < end; at += each)
      chunks.push_back({segment, at, std::min(at + each, end), stored, at + each >= end, phases});
  }
  return chunks;
}

namespace {

/// What is done once for a whole segment in a phase.
UpdateInstruction::Op op_of(optim::Phase phase) {
  using Op = UpdateInstruction::Op;
  return phase == optim::Phase::exchange ? Op::exchange : Op::whole;
}

/// A pass over all elements, chunk by chunk.
bool passes(optim::Phase phase) {
  return phase != optim::Phase::whole_parameters && phase != optim::Phase::exchange;
}

UpdateInstruction::Op pass_of(optim::Phase phase) {
  using Op = UpdateInstruction::Op;
  if (phase == optim::Phase::parameter_norms) return Op::measure;
  return phase == optim::Phase::compress ? Op::compress : Op::update;
}

/// One phase of an update's plan, behind those before it.
class PhasePlanner {
 public:
  PhasePlanner(std::span<const UpdateChunk> chunks, int phase, int buffers,
               std::vector<UpdateInstruction>& plan)
      : chunks_(chunks), phase_(phase), buffers_(static_cast<std::size_t>(buffers)), plan_(plan) {
    for (std::size_t i = 0; i < chunks.size(); ++i)
      if (const auto own = of(chunks[i]); chunks[i].stored && own && passes(*own)) stored_.push_back(i);
  }

  void run(std::size_t ahead, bool pipeline_write) {
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const std::optional<optim::Phase> phase = of(chunks_[i]);
      if (!phase) continue;
      const Op op = pass_of(*phase);
      if (!passes(*phase)) {
        if (chunks_[i].last) plan_.push_back({op_of(*phase), i, -1, phase_});
      } else if (!chunks_[i].stored) {
        plan_.push_back({op, i, -1, phase_});
      } else {
        pass(i, op, ahead, pipeline_write);
      }
    }
  }

 private:
  using Op = UpdateInstruction::Op;
  std::optional<optim::Phase> of(const UpdateChunk& chunk) const {
    const auto phase = static_cast<std::size_t>(phase_);
    return phase < chunk.phases.size() ? std::optional(chunk.phases[phase]) : std::nullopt;
  }
  int buffer_of(std::size_t position) const { return static_cast<int>(position % buffers_); }
  void pass(std::size_t chunk, Op op, std::size_t ahead, bool pipeline_write) {
    for (; read_ < stored_.size() && read_ <= position_ + ahead; ++read_)
      plan_.push_back({Op::read, stored_[read_], buffer_of(read_), phase_});
    const int buffer = buffer_of(position_++);
    plan_.push_back({op, chunk, buffer, phase_});
    if (op == Op::measure) return;
    plan_.push_back({Op::write, chunk, buffer, phase_});
    if (!pipeline_write) plan_.push_back({Op::wait_written, chunk, buffer, phase_});
  }

  std::span<const UpdateChunk> chunks_;
  int phase_;
  std::size_t buffers_;
  std::vector<UpdateInstruction>& plan_;
  std::vector<std::size_t> stored_;      ///< chunks that pass through a buffer
  std::size_t position_ = 0, read_ = 0;  ///< of stored_: the next to be updated, and to be read
};

}  // namespace

std::vector<UpdateInstruction> plan_update(std::span<const UpdateChunk> chunks, int buffers,
                                           bool pipeline_read, bool pipeline_write,
                                           std::span<const optim::Description> rules) {
  std::size_t phases = 0;
  for (const optim::Description& rule : rules) phases = std::max(phases, rule.phases.size());
  for (const UpdateChunk& chunk : chunks) {
    require(buffers >= 1 || !chunk.stored, "offload_optimizer.buffer_count must be at least 1, not ",
            buffers);
    phases = std::max(phases, chunk.phases.size());
  }
  // One buffer is being updated, and with pipeline_write one more is being written.
  const int ahead = pipeline_read ? std::max(0, buffers - 1 - (pipeline_write && buffers > 2 ? 1 : 0)) : 0;
  std::vector<UpdateInstruction> plan;
  for (std::size_t phase = 0; phase < phases; ++phase) {
    PhasePlanner(chunks, static_cast<int>(phase), buffers, plan)
        .run(static_cast<std::size_t>(ahead), pipeline_write);
    const auto measures = [&](const optim::Description& rule) {
      return phase < rule.phases.size() && rule.phases[phase] == optim::Phase::parameter_norms;
    };
    if (std::any_of(rules.begin(), rules.end(), measures))
      plan.push_back({UpdateInstruction::Op::norms, chunks.size(), -1, static_cast<int>(phase)});
  }
  return plan;
}

}  // namespace sherd::engine
