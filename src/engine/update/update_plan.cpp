#include "engine/update/update_plan.h"

#include <algorithm>
#include <optional>

#include "engine/update/whole_matrices.h"

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

namespace {

/// What is done once for a whole segment in a phase.
UpdateInstruction::Op op_of(optim::Phase phase) {
  using Op = UpdateInstruction::Op;
  return phase == optim::Phase::exchange ? Op::exchange : Op::whole;
}

/// Of what is done chunk by chunk; none for other phases.
std::optional<UpdateInstruction::Op> pass_of(optim::Phase phase) {
  using Op = UpdateInstruction::Op;
  switch (phase) {
    case optim::Phase::elementwise:
      return Op::update;
    case optim::Phase::parameter_norms:
      return Op::measure;
    case optim::Phase::compress:
      return Op::compress;
    case optim::Phase::direction:
      return Op::direct;
    case optim::Phase::refresh:
      return Op::refresh;
    case optim::Phase::whole_parameters:
    case optim::Phase::exchange:
      break;
  }
  return std::nullopt;
}

/// What is done to the chunks of that batch `left` phases before their last one, without transfers.
void add_phase(std::span<const UpdateChunk> chunks, std::size_t left, int batch,
               std::vector<UpdateInstruction>& out) {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const UpdateChunk& chunk = chunks[i];
    if (chunk.batch != batch || left >= chunk.phases.size()) continue;
    const std::size_t phase = chunk.phases.size() - 1 - left;
    const auto pass = pass_of(chunk.phases[phase]);
    const bool ends = batch > 0 ? i + 1 == chunks.size() || chunks[i + 1].batch != batch : chunk.last;
    if (pass)
      out.push_back({*pass, i, -1, static_cast<int>(phase)});
    else if (ends)
      out.push_back({op_of(chunk.phases[phase]), i, -1, static_cast<int>(phase)});
  }
}

/// Adds transfers to passes over chunks that are stored, whatever stands between them.
class TransferPlanner {
 public:
  TransferPlanner(std::span<const UpdateChunk> chunks, std::span<const UpdateInstruction> work, int buffers)
      : chunks_(chunks), work_(work), buffers_(static_cast<std::size_t>(buffers)) {
    for (std::size_t i = 0; i < work.size(); ++i)
      if (passes_buffer(work[i])) stored_.push_back(i);
  }

  void run(std::size_t ahead, bool pipeline_write, std::vector<UpdateInstruction>& plan) {
    for (const UpdateInstruction& instruction : work_) {
      if (passes_buffer(instruction))
        pass(instruction, ahead, pipeline_write, plan);
      else
        plan.push_back(instruction);
    }
  }

 private:
  using Op = UpdateInstruction::Op;
  bool passes_buffer(const UpdateInstruction& work) const {
    return is_pass(work.op) && chunks_[work.chunk].stored;
  }
  int buffer_of(std::size_t position) const { return static_cast<int>(position % buffers_); }
  void pass(const UpdateInstruction& work, std::size_t ahead, bool pipeline_write,
            std::vector<UpdateInstruction>& plan) {
    for (; read_ < stored_.size() && read_ <= position_ + ahead; ++read_) {
      const UpdateInstruction& coming = work_[stored_[read_]];
      plan.push_back({Op::read, coming.chunk, buffer_of(read_), coming.phase});
    }
    const int buffer = buffer_of(position_++);
    plan.push_back({work.op, work.chunk, buffer, work.phase});
    if (work.op == Op::measure) return;
    plan.push_back({Op::write, work.chunk, buffer, work.phase});
    if (!pipeline_write) plan.push_back({Op::wait_written, work.chunk, buffer, work.phase});
  }

  std::span<const UpdateChunk> chunks_;
  std::span<const UpdateInstruction> work_;
  std::size_t buffers_;
  std::vector<std::size_t> stored_;      ///< of work_: what passes through a buffer
  std::size_t position_ = 0, read_ = 0;  ///< of stored_: the next to be done, and to be read
};

/// All phases of all batches, one batch after the other.
std::vector<UpdateInstruction> work_of_batches(std::span<const UpdateChunk> chunks) {
  std::vector<UpdateInstruction> out;
  int last = 0;
  for (const UpdateChunk& chunk : chunks)
    if (const int batch = chunk.batch; batch > last) {
      last = batch;
      for (std::size_t left = chunk.phases.size(); left-- > 0;) add_phase(chunks, left, batch, out);
    }
  return out;
}

}  // namespace

bool is_pass(UpdateInstruction::Op op) {
  using Op = UpdateInstruction::Op;
  return op == Op::measure || op == Op::compress || op == Op::refresh || op == Op::direct || op == Op::update;
}

std::vector<UpdateInstruction> plan_update(std::span<const UpdateChunk> chunks, int buffers,
                                           bool pipeline_read, bool pipeline_write,
                                           std::span<const optim::Description> rules) {
  std::size_t phases = 0;
  for (const UpdateChunk& chunk : chunks) {
    require(buffers >= 1 || !chunk.stored, "offload_optimizer.buffer_count must be at least 1, not ",
            buffers);
    phases = std::max(phases, chunk.phases.size());
  }
  // One buffer is being updated, and with pipeline_write one more is being written.
  const int ahead = pipeline_read ? std::max(0, buffers - 1 - (pipeline_write && buffers > 2 ? 1 : 0)) : 0;
  std::vector<UpdateInstruction> plan;
  const auto add = [&](const std::vector<UpdateInstruction>& work) {
    TransferPlanner(chunks, work, buffers).run(static_cast<std::size_t>(ahead), pipeline_write, plan);
  };
  const bool measured = std::any_of(rules.begin(), rules.end(), optim::measures);
  for (std::size_t left = std::max<std::size_t>(phases, 1); left-- > 0;) {
    if (left == 0 && measured) plan.push_back({UpdateInstruction::Op::norms, chunks.size(), -1});
    std::vector<UpdateInstruction> work;
    add_phase(chunks, left, 0, work);
    add(work);
  }
  add(work_of_batches(chunks));
  return plan;
}

}  // namespace sherd::engine
