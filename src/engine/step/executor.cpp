#include "engine/step/executor.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

#include "base/waits.h"
#include "device/trace_range.h"

namespace sherd::engine {
namespace {

/// Adds the wall time of its life to a phase, in milliseconds, and to `busy` what of it was no wait; names it
/// for profilers.
class PhaseTimer {
 public:
  PhaseTimer(double& total, double& busy, const char* name)
      : range_(name),
        total_(total),
        busy_(busy),
        waited_(waited_so_far()),
        start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    const double passed =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
    total_ += passed;
    busy_ += std::max(0.0, passed - (waited_so_far() - waited_).total() * 1e3);
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  device::TraceRange range_;
  double& total_;
  double& busy_;
  WaitTotals waited_;
  std::chrono::steady_clock::time_point start_;
};

void set_up(autograd::Tape& tape, const config::Config& config, autograd::SavedInputs* keeper) {
  tape.recompute = config.training.recompute_micro_batches == 0 ? Recompute::none : config.training.recompute;
  tape.saved_inputs = keeper;
  tape.input_dtype = config.precision.compute;
  tape.saved_inputs_in_host = config.training.cpu_checkpointing;
}

std::string reason_of(const std::exception_ptr& what) {
  try {
    std::rethrow_exception(what);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace

Executor::Executor(const config::Config& config, nn::Model& model, sharding::ShardedModel& sharded,
                   const StageLayout& layout, StepUpdate& update, const Resources& resources)
    : config_(config),
      model_(model),
      sharded_(sharded),
      update_(update),
      device_(resources.device()),
      data_ranks_(resources.groups().group(comm::Axis::data)),
      whole_(whole_model(model)),
      states_(model, resources.groups().world(), resources.groups().group(comm::Axis::tensor).rank() == 0,
              device_),
      link_(layout.stages > 1 ? std::make_unique<StageLink>(device_, layout, resources.groups()) : nullptr),
      chunks_(model, sharded, link_.get(),
              [this](autograd::Tape& tape) { set_up(tape, config_, saved_inputs_.get()); }),
      evaluation_(sharded),
      run_ahead_(device_),
      loss_(device_, data_ranks_, resources.groups().group(comm::Axis::pipeline)) {
  if (link_)
    in_stages_ = std::make_unique<ModelStages>(dynamic_cast<nn::LayeredModel&>(model), layout,
                                               resources.groups().group(comm::Axis::pipeline));
  if (offload::Store* store = resources.activation_store())
    saved_inputs_ = std::make_unique<SavedInputsOnNvme>(resources.kernels(), *store);
  set_up(evaluation_.tape(), config, nullptr);
}

bool Executor::is_boundary() const {
  return boundary_.value_or(accumulated_ + 1 >= config_.batch.gradient_accumulation_steps);
}

/// Random streams go by the global order of micro-batches, so that they do not depend on how many ranks share
/// them.
RandomKey Executor::random_key(std::int64_t micro_batch) const {
  return RandomKey{config_.training.seed, 0}
      .at(static_cast<std::uint64_t>(counters_.global_steps))
      .at(static_cast<std::uint64_t>(micro_batch * data_ranks_.size() + data_ranks_.rank()));
}

/// Where times by phase are asked for, phases end when the device has done their work.
void Executor::end_phase() {
  if (config_.wall_clock_breakdown) device_.synchronize();
}

/// Gradients that a failed backward has left are of no use, and ranks may be at different places.
void Executor::require_not_failed(const char* call) const {
  require(!failed(), call, " after a backward() that failed: go on with load_checkpoint()");
}

// ---- the calls of a micro-batch ----

autograd::Var Executor::forward(const tensor::Batch& batch) {
  update_.require_whole_weights("forward()");
  require_not_failed("forward()");
  require(idle(), "forward() was called again before backward() and step()");
  if (link_)
    fail(ErrorKind::usage, "forward() on a pipeline of ", link_->stages(),
         " stages, each of which has a part of the model: call train_batch(), or eval_batch()");
  set_list(sharding::accumulate(accumulated_, is_boundary(), StepUpdate::may_begin_early(config_)), whole_);
  batches_.emplace(accumulated_, batch);
  try {
    run_next();
  } catch (...) {
    abort();
    throw;
  }
  return std::exchange(loss_of_forward_, {});
}

void Executor::backward(const autograd::Var& loss) {
  update_.require_whole_weights("backward()");
  require_not_failed("backward()");
  require(!idle() && !next_is(Op::count), "backward() needs the loss of a forward() in train() mode, once");
  for (const Instruction& each : list_)
    if (each.op == Op::begin_update) sharded_.require_no_leases();  // so that it can be tried again
  chunks_.set_loss(list_.front(), loss);
  try {
    while (!next_is(Op::count)) run_next();
  } catch (...) {
    if (failed()) {
      abort();
      loss_.clear();
    }
    throw;
  }
  failed_ = false;
}

bool Executor::step() {
  require_not_failed("step()");
  require(next_is(Op::count), "step() follows backward(), once per micro-batch");
  const bool updates = list_.size() > 1;
  if (updates) {
    sharded_.require_no_leases();  // before anything counts, so that it can be tried again
    update_.require_finite(counters_.global_steps);
  }
  while (!idle()) run_next();
  return updates;
}

// ---- a step at once ----

void Executor::run(const std::vector<Instruction>& list, const StageLayout& layout, const Next& next) {
  update_.require_usable_weights("train_batch()");
  require_not_failed("train_batch()");
  require(idle() && accumulated_ == 0, "train_batch() between forward() and step()");
  sharded_.require_no_leases();
  set_list(list, layout);
  next_ = next;
  if (!ends_late_) update_.complete();
  try {
    begin_gathers(list);
    while (!next_is(Op::update)) run_next();
    chunks_.finish();
    sharded_.end_list();
    failed_ = false;
    update_.require_finite(counters_.global_steps);
  } catch (...) {
    abort();
    if (link_) link_->abandon(reason_of(std::current_exception()));
    if (failed())
      loss_.clear();
    else
      drop_accumulated();
    throw;
  }
  while (!idle()) run_next();
}

// ---- the list ----

void Executor::set_list(const std::vector<Instruction>& list, const StageLayout& layout) {
  list_.assign(list.begin(), list.end());
  const auto update =
      std::find_if(list.begin(), list.end(), [](const Instruction& i) { return i.op == Op::update; });
  last_ = update == list.end() ? -1 : update->micro_batch;
  ends_late_ =
      std::any_of(list.begin(), list.end(), [](const Instruction& i) { return i.op == Op::update_chunk; });
  layout_ = &layout;
  next_ = nullptr;
  batches_.clear();
  weights_.clear();
  batches_read_ = 0;
  chunks_.begin(layout, last_);
}

void Executor::begin_gathers(const std::vector<Instruction>& list) {
  std::vector<Instruction> gathers;
  std::copy_if(list.begin(), list.end(), std::back_inserter(gathers),
               [](const Instruction& i) { return i.op == Op::gather || i.op == Op::release; });
  std::vector<sharding::Chunk> chunks;
  for (int c = 0; c < layout_->own_chunks(); ++c) chunks.push_back(layout_->own(c));
  chunks_.recover();
  sharded_.begin_list(gathers, chunks);
}

void Executor::run_next() {
  const Instruction instruction = list_.front();
  if (observer_) observer_->begin(instruction);
  try {
    update_.guard(coming_step(), [&] {
      execute(instruction);
      update_.poll();
    });
  } catch (...) {
    if (instruction.op == Op::update) list_.clear(), drop_accumulated();
    throw;
  }
  list_.pop_front();
  const double waited = chunks_.take_waited();
  if (observer_) observer_->end(instruction, waited);
}

void Executor::execute(const Instruction& instruction) {
  switch (instruction.op) {
    case Op::forward:
      return run_forward(instruction);
    case Op::backward:
    case Op::backward_input:
      return run_backward(instruction);
    case Op::weight_gradients:
      return run_weight_gradients(instruction);
    case Op::receive_activation:
    case Op::send_activation:
    case Op::receive_gradient:
    case Op::send_gradient:
      return chunks_.transfer(instruction);
    case Op::gather:
      return chunks_.gather(instruction);
    case Op::release:
      chunks_.release(instruction);
      return hand_over_complete();
    case Op::share_loss:
      return loss_.share();
    case Op::begin_update:
      return update_.begin();
    case Op::reduce:
      return reduce(instruction);
    case Op::count:
      return count();
    case Op::update:
      return run_update();
    case Op::update_chunk:
      return update_.update_units(sharded_.units_of(layout_->own(instruction.chunk)));
  }
}

const tensor::Batch& Executor::batch_of(std::int64_t micro_batch) {
  for (; next_ && batches_read_ <= micro_batch; ++batches_read_) batches_.emplace(batches_read_, next_());
  return batches_.at(micro_batch);
}

void Executor::run_forward(const Instruction& i) {
  PhaseTimer timer(times_.forward, busy_.forward, "forward");
  run_ahead_.begin(layout_->own_chunks());
  const tensor::Batch& batch = batch_of(i.micro_batch);
  weights_.try_emplace(i.micro_batch, loss_weight(config_, device_, batch));
  loss_of_forward_ = chunks_.forward(i, batch, random_key(i.micro_batch));
  run_ahead_.end();
  if (i.chunk + 1 == layout_->own_chunks()) {
    loss_.add(layout_->has_last(i.chunk) ? loss_of_forward_.value() : tensor::Tensor(),
              weights_.at(i.micro_batch));
    batches_.erase(i.micro_batch);
  }
  end_phase();
}

void Executor::run_backward(const Instruction& i) {
  PhaseTimer timer(times_.backward, busy_.backward, "backward");
  run_ahead_.begin(layout_->own_chunks());
  chunks_.begin_backward(i, update_.seed() * weights_.at(i.micro_batch));
  failed_ = true;  // until all has ended well: from here on it cannot be tried again
  // Where all gradients are needed before any weight changes, none of them is taken up here.
  while (chunks_.continue_backward(i)) hand_over_complete();
  if (i.micro_batch == last_) report_.early_updates = update_.updated_chunks();
  chunks_.end_backward(i);
  run_ahead_.end();
  end_phase();
}

void Executor::run_weight_gradients(const Instruction& i) {
  PhaseTimer timer(times_.backward, busy_.backward, "weight gradients");
  while (chunks_.continue_weight_gradients(i)) hand_over_complete();
  chunks_.end_weight_gradients(i);
  end_phase();
}

void Executor::reduce(const Instruction& i) {
  PhaseTimer timer(times_.backward, busy_.backward, "reduce");
  if (i.micro_batch == last_) sharded_.finish_gradients();
  hand_over_complete();
  end_phase();
}

/// To an update that has begun; those of chunks that the list holds wait for their release.
void Executor::hand_over_complete() {
  std::vector<sharding::Segment*> ready;
  for (sharding::Segment* segment : sharded_.gradients().take_complete()) complete_.push_back(segment);
  const auto held =
      std::stable_partition(complete_.begin(), complete_.end(),
                            [&](const sharding::Segment* segment) { return !chunks_.holds(*segment); });
  ready.assign(complete_.begin(), held);
  complete_.erase(complete_.begin(), held);
  update_.gradients_complete(ready, [this] { return loss_.mean(); });
}

void Executor::count() {
  ++counters_.micro_steps;
  ++accumulated_;
  report_.applied = false;
}

void Executor::run_update() {
  {
    PhaseTimer timer(times_.update, busy_.update, "update");
    report_.applied = update_.finish(loss_.mean(), coming_step(), report_, ends_late_);
  }
  states_.end_step(report_.applied);
  if (!report_.applied) ++counters_.skipped_steps;
  counters_.global_samples += config_.batch.train_batch_size;
  report_.step = ++counters_.global_steps;
  drop_accumulated();
  {
    PhaseTimer timer(times_.update, busy_.update, "update");
    end_phase();
  }
  report_.times = std::exchange(times_, {});
  report_.busy = std::exchange(busy_, {});
}

/// Ends what an exception has left of the list.
void Executor::abort() {
  list_.clear();
  batches_.clear();
  complete_.clear();
  loss_of_forward_ = {};
  chunks_.drop();
}

/// The coming micro-batch is the first of a step.
void Executor::drop_accumulated() {
  accumulated_ = 0;
  complete_.clear();
  loss_.clear();
  states_.drop_step();
  sharded_.gradients().clear();
}

// ---- evaluation ----

void Executor::evaluate(const std::function<void(autograd::Tape&)>& run) {
  const device::TraceRange range("evaluation");
  update_.require_whole_weights("evaluation");
  require_not_failed("evaluation");
  // Between forward() and backward() the gathered units belong to that micro-batch.
  require(idle() || next_is(Op::count),
          "evaluation between forward() and backward(): finish the micro-batch first");
  chunks_.recover();  // from a forward that has failed
  evaluation_.tape().random = random_key(accumulated_);
  try {
    evaluation_.evaluate(run);
  } catch (...) {
    // Stages that wait for this one would take the next evaluation's values for this one's.
    if (link_) link_->abandon(reason_of(std::current_exception()));
    throw;
  }
}

autograd::Var Executor::evaluate(const tensor::Batch& batch) {
  autograd::Var loss;
  evaluate([&](autograd::Tape& tape) { loss = model_(tape, batch); });
  end_phase();
  return loss;
}

void Executor::abandon_failed() {
  if (failed()) sharded_.abandon_passes();
}

void Executor::reset() {
  abort();
  failed_ = false;
  drop_accumulated();
}

}  // namespace sherd::engine
