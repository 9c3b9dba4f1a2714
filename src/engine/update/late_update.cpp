// Ends what an update has left for beside the next step: units get their new parameters when their turn
// comes.

#include <algorithm>

#include "base/error.h"
#include "engine/update/update_pipeline.h"

namespace sherd::engine {

using sharding::Segment;

void UpdatePipeline::leave() {
  require(decided(), "an update can only be left for later after it began");
  // All ranks come by here, and so to what they exchange for more than a batch.
  const auto exchanged = std::find_if(plan_.rbegin(), plan_.rend(), [&](const UpdateInstruction& i) {
    return i.op == UpdateInstruction::Op::agree ||
           (i.op == UpdateInstruction::Op::exchange && chunks_[i.chunk].batch == 0);
  });
  for (const auto end = static_cast<std::size_t>(plan_.rend() - exchanged); step_->next < end; ++step_->next)
    perform(plan_[step_->next], true);
  step_->late = true;
  step_->unpublished.clear();  // each unit is published when its turn comes
  all_complete();
  model_.begin_changes();
  for (std::int64_t i = 0; i < step_->updated; ++i) {
    const UpdateChunk& chunk = chunks_[static_cast<std::size_t>(i)];
    model_.changed(*chunk.segment, chunk.begin, {}, chunk.last);
  }
  poll();
}

/// Up to its last chunk, whose writes have begun.
void UpdatePipeline::update_through(const Segment& segment) {
  const auto last = std::find_if(chunks_.begin(), chunks_.end(), [&](const UpdateChunk& chunk) {
    return chunk.segment == &segment && chunk.last;
  });
  if (last == chunks_.end()) return;
  const auto performs_next = [&] {
    if (step_->next >= plan_.size()) return false;
    if (step_->updated <= last - chunks_.begin()) return true;
    const UpdateInstruction::Op op = plan_[step_->next].op;
    return op == UpdateInstruction::Op::write || op == UpdateInstruction::Op::wait_written;
  };
  for (; performs_next(); ++step_->next) perform(plan_[step_->next], true);
}

void UpdatePipeline::update_units(std::span<sharding::Unit* const> units) {
  std::vector<sharding::Unit*> outdated;
  for (sharding::Unit* unit : units)
    if (unit->outdated()) outdated.push_back(unit);
  if (outdated.empty()) return;
  for (const sharding::Unit* unit : outdated)
    for (const auto& segment : unit->segments())
      if (segment->key().trainable) update_through(*segment);
  for (const sharding::Unit* unit : outdated)
    for (const auto& segment : unit->segments())
      if (segment->key().trainable) publish(*segment);
  model_.end_changes(outdated);
}

void UpdatePipeline::poll() {
  if (!step_) return;
  advance(false);
  if (step_->late && !model_.changes()) end_late(false);
}

void UpdatePipeline::complete() {
  require(step_ && step_->late, "no update was left for later");
  std::vector<sharding::Unit*> all;
  for (const auto& unit : model_.units()) all.push_back(unit.get());
  update_units(all);
  advance(true);
  end_late(true);
}

void UpdatePipeline::end_late(bool wait) {
  if (!buffers_.all_written(wait)) return;
  follow_completion();
  abandon();
}

}  // namespace sherd::engine
