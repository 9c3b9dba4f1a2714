#include "engine/update/update_plan.h"

#include <algorithm>

#include "base/error.h"

namespace sherd::engine {

using optim::Phase;

bool is_pass(Phase phase) {
  return phase != Phase::whole_parameters && phase != Phase::exchange;
}

bool writes(Phase phase) {
  return phase != Phase::parameter_norms;
}

namespace {

/// Adds what is done to the chunks of that batch `left` phases before their last one, without transfers.
void add_phase(std::span<const UpdateChunk> chunks, std::size_t left, int batch,
               std::vector<UpdateInstruction>& out) {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const UpdateChunk& chunk = chunks[i];
    if (chunk.batch != batch || left >= chunk.phases.size()) continue;
    const std::size_t phase = chunk.phases.size() - 1 - left;
    const bool pass = is_pass(chunk.phases[phase]);
    const bool ends = batch > 0 ? i + 1 == chunks.size() || chunks[i + 1].batch != batch : chunk.last;
    if (pass || ends)
      out.push_back({pass ? UpdateInstruction::Op::pass : UpdateInstruction::Op::exchange, i, -1,
                     static_cast<int>(phase)});
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
  bool passes_buffer(const UpdateInstruction& work) const {
    return work.op == UpdateInstruction::Op::pass && chunks_[work.chunk].stored;
  }
  int buffer_of(std::size_t position) const { return static_cast<int>(position % buffers_); }
  void pass(const UpdateInstruction& work, std::size_t ahead, bool pipeline_write,
            std::vector<UpdateInstruction>& plan) {
    for (; read_ < stored_.size() && read_ <= position_ + ahead; ++read_) {
      const UpdateInstruction& coming = work_[stored_[read_]];
      plan.push_back({UpdateInstruction::Op::read, coming.chunk, buffer_of(read_), coming.phase});
    }
    const int buffer = buffer_of(position_++);
    plan.push_back({UpdateInstruction::Op::pass, work.chunk, buffer, work.phase});
    if (!writes(chunks_[work.chunk].phases[static_cast<std::size_t>(work.phase)])) return;
    plan.push_back({UpdateInstruction::Op::write, work.chunk, buffer, work.phase});
    if (!pipeline_write)
      plan.push_back({UpdateInstruction::Op::wait_written, work.chunk, buffer, work.phase});
  }

  std::span<const UpdateChunk> chunks_;
  std::span<const UpdateInstruction> work_;
  std::size_t buffers_;
  std::vector<std::size_t> stored_;      ///< indices of work_ that pass through a buffer
  std::size_t position_ = 0, read_ = 0;  ///< indices of stored_: the next to be done, and to be read
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
    if (left == 0 && measured) plan.push_back({UpdateInstruction::Op::agree, chunks.size(), -1});
    std::vector<UpdateInstruction> work;
    add_phase(chunks, left, 0, work);
    add(work);
  }
  add(work_of_batches(chunks));
  return plan;
}

}  // namespace sherd::engine
