#include "engine/update/update_pipeline.h"

#include <algorithm>
#include <utility>

#include "device/trace_range.h"
#include "engine/update/update_staging.h"

namespace sherd::engine {
namespace {

using sharding::Segment;
using sharding::StateBuffer;
using tensor::Tensor;

constexpr std::size_t page = 4096;

/// Of which a pass over elements has its part: all but what is exchanged as a whole.
bool in_passes(const optim::State& state) {
  return state.held != optim::Held::by_one_of_them;
}

/// Every lasting state that passes over elements read or write, gradients apart.
template <class SegmentLike, class Visit>
void for_each_state(SegmentLike& segment, const Visit& visit) {
  visit(segment.parameters());
  if (segment.masters()) visit(segment.masters());
  for (std::size_t i = 0; i < segment.moments().size(); ++i)
    if (in_passes(segment.states()[i])) visit(segment.moments()[i]);
}

std::size_t room_for(std::int64_t elements, DType dtype) {
  return (static_cast<std::size_t>(elements) * size_of(dtype) + page - 1) / page * page;
}

/// What the largest chunk keeps in the given store.
std::size_t bytes_through(const offload::Store* store, std::span<const UpdateChunk> chunks) {
  std::size_t most = 0;
  for (const UpdateChunk& chunk : chunks) {
    std::size_t bytes = 0;
    for_each_state(*chunk.segment, [&](const StateBuffer& state) {
      if (state.stored() && state.store() == store) bytes += room_for(chunk.end - chunk.begin, state.dtype());
    });
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace

UpdatePipeline::UpdatePipeline(sharding::ShardedModel& model, const sharding::StateSources& sources,
                               const UpdatePipelineOptions& options)
    : model_(model), kernels_(sources.kernels), options_(options), order_(model.trainable_segments()) {
  make_plan(1);
  int count = 0;  // those of the plan: fewer than allowed where fewer passes need one
  for (const UpdateInstruction& instruction : plan_) count = std::max(count, instruction.buffer + 1);
  add_lane(sources.optimizer_store, count);
  if (sources.parameter_store != sources.optimizer_store) add_lane(sources.parameter_store, count);
  stages_.resize(static_cast<std::size_t>(count));
}

/// Chunks, and what is done to them, in the order of the segments. Batches come last, so that chunks are
/// updated in their order.
void UpdatePipeline::make_plan(std::int64_t step) {
  std::stable_partition(order_.begin(), order_.end(), [&](const Segment* segment) {
    return !optim::takes_matrices(options_.rules[static_cast<std::size_t>(segment->key().rule)]);
  });
  chunks_ = cut_update(order_, options_.sub_group_size, options_.rules, step);
  plan_ = plan_update(chunks_, options_.buffer_count, options_.pipeline_read, options_.pipeline_write,
                      options_.rules);
  passes_.clear();
  for (std::size_t i = 0; i < plan_.size(); ++i)
    if (is_pass(plan_[i].op)) passes_.push_back(i);
}

void UpdatePipeline::add_lane(offload::Store* store, int count) {
  const std::size_t bytes = store ? bytes_through(store, chunks_) : 0;
  if (bytes == 0) return;
  Lane lane;
  lane.store = store;
  lane.pool = std::make_unique<offload::BufferPool>(*store, kernels_.device().ledger(), count, bytes,
                                                    device::Category::workspace,
                                                    "zero_optimization.offload_optimizer.buffer_count");
  for (int i = 0; i < count; ++i) {
    lane.buffers.push_back(lane.pool->try_acquire());
    require(static_cast<bool>(lane.buffers.back()), "a new pool has no free buffer");
    if (!kernels_.device().accelerator()) continue;
    lane.pins.push_back(kernels_.device().pin(lane.buffers.back().data(), bytes));
    if (!lane.pins.back())
      fail(ErrorKind::memory, "the system does not page-lock ", bytes,
           " bytes for a buffer between NVMe and the GPU: raise ", "the limit of locked memory (ulimit -l)");
  }
  buffer_bytes_ += bytes;
  lanes_.push_back(std::move(lane));
}

UpdateView UpdatePipeline::bind(const UpdateChunk& chunk, int buffer) const {
  const Segment& segment = *chunk.segment;
  std::vector<std::size_t> at(lanes_.size());
  const auto view = [&](const StateBuffer& state) {
    if (!state.stored()) return state.range(chunk.begin, chunk.end);
    const std::int64_t elements = chunk.end - chunk.begin;
    std::size_t lane = 0;
    while (lanes_[lane].store != state.store()) ++lane;
    std::byte* data = lanes_[lane].buffers[static_cast<std::size_t>(buffer)].data() +
                      std::exchange(at[lane], at[lane] + room_for(elements, state.dtype()));
    const device::Block block{data, static_cast<std::size_t>(elements) * size_of(state.dtype())};
    return Tensor::view_of(device::Storage(block, nullptr), 0, {elements}, state.dtype());
  };
  UpdateView out;
  out.segment = &segment;
  out.begin = chunk.begin;
  out.parameters = view(segment.parameters());
  if (segment.masters()) out.masters = view(segment.masters());
  for (std::size_t i = 0; i < segment.moments().size(); ++i)
    if (in_passes(segment.states()[i])) {
      out.moments.push_back(view(segment.moments()[i]));
      out.scales.push_back(segment.scales(i, chunk.begin, chunk.end));
    }
  out.gradients = segment.gradients().range(chunk.begin, chunk.end);
  return out;
}

/// From when on the segment may be updated; null when that is not known yet.
const device::Event* UpdatePipeline::ready(const Segment& segment, bool wait) {
  const auto known = std::find_if(step_->complete.begin(), step_->complete.end(),
                                  [&](const Complete& c) { return c.segment == &segment; });
  if (known != step_->complete.end()) return &known->ready;
  if (wait && !step_->all_complete) step_->all_complete = kernels_.device().record();
  return step_->all_complete ? &*step_->all_complete : nullptr;
}

/// Tells the optimizer of all passes up to this one. False when that has to wait for gradients, and may not.
bool UpdatePipeline::announce(std::size_t pass, bool wait) {
  for (; step_->announced <= pass; ++step_->announced) {
    const UpdateInstruction& instruction = plan_[passes_[step_->announced]];
    const UpdateChunk& next = chunks_[instruction.chunk];
    const device::Event* from = ready(*next.segment, wait);
    if (!from) return false;
    step_->optimizer.announce(bind(next, instruction.buffer), *from, kernels_);
  }
  return true;
}

/// The one that is made now, and the next, which comes meanwhile.
void UpdatePipeline::announce_pass() {
  const std::size_t pass = step_->passed++;
  announce(pass, true);
  if (pass + 1 < passes_.size()) announce(pass + 1, false);
}

void UpdatePipeline::pass(const UpdateInstruction& instruction, const UpdateView& view) {
  using Op = UpdateInstruction::Op;
  announce_pass();
  step_->changed = step_->changed || instruction.op != Op::measure;
  const std::string& unit = view.segment->name();
  Optimizer& optimizer = step_->optimizer;
  if (instruction.op == Op::measure) {
    const device::TraceRange range("measure", unit);
    optimizer.measure(view, *step_->factor, kernels_);
  } else if (instruction.op == Op::compress) {
    const device::TraceRange range("compress", unit);
    optimizer.compress(view, *step_->factor, kernels_);
  } else if (instruction.op == Op::refresh) {
    const device::TraceRange range("refresh", unit);
    optimizer.refresh(view, *step_->factor, kernels_);
  } else if (instruction.op == Op::direct) {
    const device::TraceRange range("directions", unit);
    if (!optimizer.make_directions(view, *step_->factor, kernels_))
      fail(ErrorKind::numerics, "the momentum of unit '", unit,
           "' is NaN or infinite: lower the learning rate and resume from the last checkpoint");
  } else {
    update(chunks_[instruction.chunk], view);
  }
}

void UpdatePipeline::update(const UpdateChunk& chunk, const UpdateView& view) {
  ++step_->updated;
  const device::TraceRange range("update", chunk.segment->name());
  if (!step_->optimizer.update(view, *step_->factor, kernels_))
    fail(ErrorKind::numerics, "the update of unit '", chunk.segment->name(),
         "' is NaN or infinite: lower the learning rate and resume from the last checkpoint");
  if (!chunk.last || step_->late) return;
  if (step_->publishes)
    publish(*chunk.segment);
  else
    step_->unpublished.push_back(chunk.segment);
}

void UpdatePipeline::publish(Segment& segment) {
  if (segment.gather_after_update()) step_->optimizer.join();  // what is gathered are the new parameters
  model_.publish(segment);
}

namespace {

/// Whether all have ended; with `wait`, once they have. Throws what ended them.
bool ended(std::vector<offload::Io>& ios, bool wait) {
  if (!wait && !std::all_of(ios.begin(), ios.end(), [](const offload::Io& io) { return io.ready(); }))
    return false;
  const device::TraceRange range("wait for NVMe");
  for (offload::Io& io : ios) io.wait();
  ios.clear();
  return true;
}

enum class Way : std::uint8_t { read, write };

optim::Phase pass_of(const UpdateChunk& chunk, int phase) {
  return chunk.phases[static_cast<std::size_t>(phase)];
}

/// Whether a pass reads, or writes, the weights.
bool moves_weights(const UpdateChunk& chunk, int phase, Way way) {
  const optim::Phase pass = pass_of(chunk, phase);
  if (pass == optim::Phase::refresh) return way == Way::read;
  return pass != optim::Phase::compress && pass != optim::Phase::direction;
}

/// Whether a pass reads, or writes, a state that is not the weight. Packing takes the momentum and the error,
/// and leaves the error. Then what was agreed on comes in place of the momentum, and the variance stays:
/// either as the weights are updated, or in a pass before that, which reads all.
bool moves(const UpdateChunk& chunk, int phase, const optim::State& state, Way way) {
  using optim::Phase;
  // Whole matrices lie between a pass over momenta and one over weights.
  if (chunk.batch > 0) return !moves_weights(chunk, phase, way);
  const auto has = [&](Phase wanted) {
    return std::find(chunk.phases.begin(), chunk.phases.end(), wanted) != chunk.phases.end();
  };
  const bool exchanges = has(Phase::compress), refreshes = has(Phase::refresh);
  const bool error = state.held == optim::Held::by_each, momentum = &state == chunk.segment->states().data();
  switch (pass_of(chunk, phase)) {
    case Phase::compress:
      return error || (momentum && way == Way::read);
    case Phase::refresh:
      return way == Way::read || momentum || error || state.fresh;
    default:
      if (refreshes) return way == Way::read && !error && !state.fresh;
      if (exchanges) return error || momentum == (way == Way::write);
      return !error && !state.fresh;
  }
}

/// Visits each stored state of the chunk's segment that a pass of this phase reads, or writes, with its part
/// of the view.
template <class Visit>
void for_each_stored(const UpdateChunk& chunk, int phase, Way way, const UpdateView& view,
                     const Visit& visit) {
  Segment& segment = *chunk.segment;
  const auto each = [&](StateBuffer& state, const Tensor& staged) {
    if (state.stored()) visit(state, staged);
  };
  if (moves_weights(chunk, phase, way)) {
    each(segment.parameters(), view.parameters);
    if (segment.masters()) each(segment.masters(), view.masters);
  }
  for (std::size_t i = 0; i < view.moments.size(); ++i)
    if (moves(chunk, phase, segment.states()[i], way)) each(segment.moments()[i], view.moments[i]);
}

}  // namespace

/// False when that would have to wait, and may not.
bool UpdatePipeline::perform(const UpdateInstruction& instruction, bool wait) {
  using Op = UpdateInstruction::Op;
  if (instruction.op == Op::norms) {
    if (wait) step_->optimizer.share_norms(model_, kernels_.device());
    return wait;
  }
  if (instruction.op == Op::whole) {
    if (wait) step_->optimizer.orthogonalize(kernels_);
    return wait;
  }
  const UpdateChunk& chunk = chunks_[instruction.chunk];
  if (instruction.op == Op::exchange) {
    const device::TraceRange range("exchange momentum", chunk.segment->name());
    if (wait) step_->optimizer.exchange_momentum(*chunk.segment, kernels_);
    return wait;
  }
  // On a GPU backward is queued far ahead: the thread goes on with that rather than wait for gradients.
  const auto complete = [&] {
    if (!step_->factor) return false;
    if (step_->late && !wait && !model_.may_change(*chunk.segment)) return false;
    const device::Event* from = ready(*chunk.segment, wait);
    return from && (wait || from->reached());
  };
  if (instruction.buffer < 0) {
    if (!complete()) return false;
    const UpdateView view = bind(chunk, instruction.buffer);
    pass(instruction, view);
    if (step_->late && moves_weights(chunk, instruction.phase, Way::write))
      model_.changed(*chunk.segment, chunk.begin, view.parameters, chunk.last);
    return true;
  }
  Stage& stage = stages_[static_cast<std::size_t>(instruction.buffer)];
  switch (instruction.op) {
    case Op::read:
      if (!ended(stage.writes, wait)) return false;
      stage.view = bind(chunk, instruction.buffer);
      for_each_stored(
          chunk, instruction.phase, Way::read, stage.view,
          [&](StateBuffer& state, const Tensor& to) { stage.reads.push_back(state.read(chunk.begin, to)); });
      return true;
    case Op::measure:
    case Op::compress:
    case Op::refresh:
    case Op::direct:
    case Op::update:
      if (!complete() || !ended(stage.reads, wait)) return false;
      pass(instruction, stage.view);
      return true;
    case Op::write:
      for_each_stored(chunk, instruction.phase, Way::write, stage.view,
                      [&](StateBuffer& state, const Tensor& from) {
                        stage.writes.push_back(state.write(chunk.begin, from));
                      });
      // Reads that begin from here on see what is being written.
      if (step_->late && moves_weights(chunk, instruction.phase, Way::write))
        model_.changed(*chunk.segment, chunk.begin, stage.view.parameters, chunk.last);
      return true;
    case Op::wait_written:
      return ended(stage.writes, wait);
    case Op::norms:
    case Op::whole:
    case Op::exchange:
      break;  // handled above
  }
  return true;
}

void UpdatePipeline::advance(bool wait) {
  while (step_->next < plan_.size() && perform(plan_[step_->next], wait)) ++step_->next;
}

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
  if (!as_planned) make_plan(coming);
  step_.emplace(Step{optimizer, factor});
  advance(false);
}

void UpdatePipeline::gradients_complete(const Segment& segment) {
  step_->complete.push_back({&segment, kernels_.device().record()});
  advance(false);
}

void UpdatePipeline::update_rest() {
  require(under_way(), "an update can only be finished after it began");
  if (!step_->all_complete) step_->all_complete = kernels_.device().record();
  advance(true);
}

void UpdatePipeline::finish() {
  require(under_way(), "an update can only be finished after it began");
  step_->publishes = true;
  if (!step_->all_complete) step_->all_complete = kernels_.device().record();  // before what publishing adds
  for (Segment* segment : std::exchange(step_->unpublished, {})) publish(*segment);
  update_rest();
  for (Stage& stage : stages_) ended(stage.writes, true);
  model_.end_step();
  follow_completion();
  abandon();
}

void UpdatePipeline::leave() {
  require(decided(), "an update can only be left for later after it began");
  // All ranks come by here, and so to what they exchange beside parameters.
  const auto exchanged = std::find_if(plan_.rbegin(), plan_.rend(), [](const UpdateInstruction& i) {
    return i.op == UpdateInstruction::Op::norms || i.op == UpdateInstruction::Op::exchange;
  });
  for (const auto end = static_cast<std::size_t>(plan_.rend() - exchanged); step_->next < end; ++step_->next)
    perform(plan_[step_->next], true);
  step_->late = true;
  step_->unpublished.clear();  // each unit is published when its turn comes
  if (!step_->all_complete) step_->all_complete = kernels_.device().record();
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
  for (Stage& stage : stages_)
    if (!ended(stage.writes, wait)) return;
  follow_completion();
  abandon();
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
  make_plan(step_->optimizer.steps());
}

void UpdatePipeline::abandon() noexcept {
  for (Stage& stage : stages_) stage = {};  // waits
  if (step_) step_->optimizer.end_series();
  if (step_ && step_->late) model_.abandon_changes();
  step_.reset();
}

}  // namespace sherd::engine
