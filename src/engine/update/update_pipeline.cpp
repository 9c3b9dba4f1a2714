#include "engine/update/update_pipeline.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "device/trace_range.h"

namespace sherd::engine {

using optim::Phase;
using sharding::Segment;

namespace {

/// Buffers that the plan uses: fewer than allowed where fewer passes need one.
int buffers_of(std::span<const UpdateInstruction> plan) {
  int count = 0;
  for (const UpdateInstruction& instruction : plan) count = std::max(count, instruction.buffer + 1);
  return count;
}

const char* trace_name(Phase phase) {
  switch (phase) {
    case Phase::parameter_norms:
      return "measure";
    case Phase::compress:
      return "compress";
    case Phase::refresh:
      return "refresh";
    case Phase::direction:
      return "directions";
    default:
      return "update";
  }
}

}  // namespace

UpdatePipeline::UpdatePipeline(sharding::ShardedModel& model, const sharding::StateSources& sources,
                               const UpdatePipelineOptions& options)
    : model_(model),
      kernels_(sources.kernels),
      options_(options),
      order_(model.trainable_segments()),
      plan_(make_plan(1)),
      buffers_(sources, chunks_, buffers_of(plan_)) {}

/// Chunks, and what is done to them, in the order of the segments. Batches come last, so that chunks are
/// updated in their order.
std::vector<UpdateInstruction> UpdatePipeline::make_plan(std::int64_t step) {
  std::stable_partition(order_.begin(), order_.end(), [&](const Segment* segment) {
    return !optim::takes_matrices(options_.rules[static_cast<std::size_t>(segment->key().rule)]);
  });
  chunks_ = cut_update(order_, options_.sub_group_size, options_.rules, step);
  return plan_update(chunks_, options_.buffer_count, options_.pipeline_read, options_.pipeline_write,
                     options_.rules);
}

// ---- a step ----

void UpdatePipeline::run(Optimizer& optimizer, double factor) {
  begin(optimizer, factor);
  finish();
}

void UpdatePipeline::begin(Optimizer& optimizer, std::optional<double> factor) {
  abandon();
  const std::int64_t coming = optimizer.steps() + (factor ? 0 : 1);
  const bool as_planned = std::all_of(chunks_.begin(), chunks_.end(), [&](const UpdateChunk& chunk) {
    return chunk.phases.data() == phases_of(*chunk.segment, options_.rules, coming).data();
  });
  if (!as_planned) plan_ = make_plan(coming);
  step_.emplace(Step{optimizer, factor});
  advance(false);
}

void UpdatePipeline::gradients_complete(const Segment& segment) {
  step_->complete.push_back({&segment, kernels_.device().record()});
  advance(false);
}

void UpdatePipeline::update_rest() {
  require(under_way(), "an update can only be finished after it began");
  all_complete();
  advance(true);
}

void UpdatePipeline::finish() {
  require(under_way(), "an update can only be finished after it began");
  step_->publishes = true;
  all_complete();  // before what publishing adds
  for (Segment* segment : std::exchange(step_->unpublished, {})) publish(*segment);
  update_rest();
  buffers_.all_written(true);
  model_.end_step();
  follow_completion();
  abandon();
}

void UpdatePipeline::abandon() noexcept {
  buffers_.drop();  // waits
  if (step_) step_->optimizer.end_step();
  if (step_ && step_->late) model_.abandon_changes();
  step_.reset();
}

/// The order of the next step: that of this one's gradients, then what it was not told of.
void UpdatePipeline::follow_completion() {
  if (step_->complete.empty()) return;
  std::vector<Segment*> order = model_.trainable_segments();
  const auto place = [&](const Segment* segment) {
    return std::find_if(step_->complete.begin(), step_->complete.end(),
                        [&](const Complete& c) { return c.segment == segment; }) -
           step_->complete.begin();
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](const Segment* a, const Segment* b) { return place(a) < place(b); });
  if (order == order_) return;
  order_ = std::move(order);
  plan_ = make_plan(step_->optimizer.steps());
}

// ---- the plan ----

void UpdatePipeline::advance(bool wait) {
  while (step_->next < plan_.size() && perform(plan_[step_->next], wait)) ++step_->next;
}

/// False when that would have to wait, and may not.
bool UpdatePipeline::perform(const UpdateInstruction& instruction, bool wait) {
  using Op = UpdateInstruction::Op;
  if (instruction.op == Op::agree) {
    if (wait) step_->optimizer.agree(model_, kernels_.device());
    return wait;
  }
  const UpdateChunk& chunk = chunks_[instruction.chunk];
  const Phase phase = phase_of(instruction);
  RuleUpdate& rule = step_->optimizer.update_of(*chunk.segment);
  switch (instruction.op) {
    case Op::read:
      if (!buffers_.has_written(instruction.buffer, wait)) return false;
      buffers_.read(chunk, phase, rule, instruction.buffer);
      return true;
    case Op::pass:
      if (!may_pass(chunk, wait)) return false;
      if (instruction.buffer >= 0 && !buffers_.has_read(instruction.buffer, wait)) return false;
      pass(instruction);
      if (instruction.buffer < 0) note_change(instruction);
      return true;
    case Op::write:
      buffers_.write(chunk, phase, rule, instruction.buffer);
      note_change(instruction);
      return true;
    case Op::wait_written:
      return buffers_.has_written(instruction.buffer, wait);
    case Op::exchange:
      if (wait) rule.exchange(phase, *chunk.segment, kernels_);
      return wait;
    case Op::agree:
      break;  // handled above
  }
  return true;
}

/// Whether the chunk's gradients are complete, and its weights may change. On a GPU backward is queued far
/// ahead: the thread goes on with that rather than wait for gradients.
bool UpdatePipeline::may_pass(const UpdateChunk& chunk, bool wait) {
  if (!step_->factor) return false;
  if (step_->late && !wait && !model_.may_change(*chunk.segment)) return false;
  const device::Event* from = ready(*chunk.segment, wait);
  return from && (wait || from->reached());
}

void UpdatePipeline::pass(const UpdateInstruction& instruction) {
  announce_passes();
  const UpdateChunk& chunk = chunks_[instruction.chunk];
  const Phase phase = phase_of(instruction);
  step_->changed = step_->changed || writes(phase);
  if (phase == Phase::elementwise) ++step_->updated;
  const device::TraceRange range(trace_name(phase), chunk.segment->name());
  const UpdateView view = buffers_.view(chunk, instruction.buffer);
  if (!step_->optimizer.update_of(*chunk.segment).pass(phase, view, *step_->factor, kernels_))
    fail(ErrorKind::numerics, "the update of unit '", chunk.segment->name(),
         "' is NaN or infinite: lower the learning rate and resume from the last checkpoint");
  if (phase != Phase::elementwise || !chunk.last || step_->late) return;
  if (step_->publishes)
    publish(*chunk.segment);
  else
    step_->unpublished.push_back(chunk.segment);
}

/// Weights that are left for later are gathered once they are new: by this pass, or behind the write that
/// begins now.
void UpdatePipeline::note_change(const UpdateInstruction& instruction) {
  const UpdateChunk& chunk = chunks_[instruction.chunk];
  if (step_->late && phase_of(instruction) == Phase::elementwise)
    model_.changed(*chunk.segment, chunk.begin, buffers_.view(chunk, instruction.buffer).parameters,
                   chunk.last);
}

void UpdatePipeline::publish(Segment& segment) {
  if (segment.gather_after_update())
    step_->optimizer.passes().join();  // what is gathered are the new parameters
  model_.publish(segment);
}

// ---- when gradients are complete ----

void UpdatePipeline::all_complete() {
  if (!step_->all_complete) step_->all_complete = kernels_.device().record();
}

/// From when on the segment may be updated; null when that is not known yet.
const device::Event* UpdatePipeline::ready(const Segment& segment, bool wait) {
  const auto known = std::find_if(step_->complete.begin(), step_->complete.end(),
                                  [&](const Complete& c) { return c.segment == &segment; });
  if (known != step_->complete.end()) return &known->ready;
  if (wait) all_complete();
  return step_->all_complete ? &*step_->all_complete : nullptr;
}

/// Tells where passes are made of the one that comes now and, once its gradients are known to be complete, of
/// the next one, whose states come meanwhile.
void UpdatePipeline::announce_passes() {
  for (std::size_t& at = step_->announced; at < plan_.size(); ++at) {
    if (plan_[at].op != UpdateInstruction::Op::pass) continue;
    const bool ahead = at > step_->next;
    const UpdateChunk& chunk = chunks_[plan_[at].chunk];
    const device::Event* from = ready(*chunk.segment, !ahead);
    if (!from) return;
    step_->optimizer.passes().announce(buffers_.view(chunk, plan_[at].buffer), *from, kernels_.device());
    if (ahead) return static_cast<void>(++at);
  }
}

}  // namespace sherd::engine
