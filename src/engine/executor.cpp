#include "engine/executor.h"

#include <chrono>
#include <utility>

#include "device/trace_range.h"

namespace sherd::engine {
namespace {

/// Adds the wall time of its life to `total`, in milliseconds, and names it for profilers.
class PhaseTimer {
 public:
  PhaseTimer(double& total, const char* name)
      : range_(name), total_(total), start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    total_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  device::TraceRange range_;
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

autograd::Recompute recompute_for(const config::Config& config) {
  switch (config.training.recompute) {
    case config::Recompute::full:
      return autograd::Recompute::full;
    case config::Recompute::selective:
      return autograd::Recompute::selective;
    case config::Recompute::none:
      break;
  }
  return autograd::Recompute::none;
}

}  // namespace

Executor::Executor(const Parts& parts)
    : parts_(parts),
      pass_(parts.sharded),
      evaluation_(parts.sharded),
      run_ahead_(parts.device),
      loss_(parts.device, parts.data_ranks) {
  for (autograd::Tape* tape : {&pass_.tape(), &evaluation_.tape()}) {
    tape->recompute = recompute_for(parts.config);
    tape->input_dtype = parts.config.precision.compute;
    tape->checkpoints_in_host = parts.config.training.cpu_checkpointing;
  }
}

bool Executor::is_boundary() const {
  return boundary_.value_or(accumulated_ + 1 >= parts_.config.batch.gradient_accumulation_steps);
}

/// Random streams go by the global order of micro-batches, so that they do not depend on how many ranks share
/// them.
RandomKey Executor::key() const {
  return RandomKey{parts_.config.training.seed, 0}
      .at(static_cast<std::uint64_t>(parts_.counters.global_steps))
      .at(static_cast<std::uint64_t>(accumulated_ * parts_.data_ranks.size() + parts_.data_ranks.rank()));
}

/// Where times by phase are asked for, phases end when the device has done their work.
void Executor::end_phase() {
  if (parts_.config.wall_clock_breakdown) parts_.device.synchronize();
}

/// What a failed backward has left of the gradients is of no use, and ranks may be at different places.
void Executor::require_not_failed(const char* call) const {
  require(!failed(), call, " after a backward() that failed: go on with load_checkpoint()");
}

autograd::Var Executor::forward(const tensor::Batch& batch) {
  PhaseTimer timer(times_.forward, "forward");
  parts_.update.require_whole_weights("forward()");
  require_not_failed("forward()");
  require(idle(), "forward() was called again before backward() and step()");
  const bool boundary = is_boundary();
  run_ahead_.begin();
  pass_.begin({0, parts_.sharded.parts()}, boundary);
  pass_.tape().random = key();
  autograd::Var loss = parts_.model(pass_.tape(), batch);
  loss_.add(loss.value());
  const auto list = sharding::accumulate(accumulated_, boundary, StepUpdate::may_begin_early(parts_.config));
  list_.assign(list.begin() + 1, list.end());  // the forward itself is done
  end_phase();
  return loss;
}

void Executor::backward(const autograd::Var& loss) {
  PhaseTimer timer(times_.backward, "backward");
  parts_.update.require_whole_weights("backward()");
  require_not_failed("backward()");
  require(!idle() && !next_is(Op::count), "backward() needs the loss of a forward() in train() mode, once");
  for (const sharding::Instruction& each : list_)
    if (each.op == Op::begin_update) parts_.sharded.require_no_leases();  // so that it can be tried again
  parts_.update.guard(coming_step(), [&] {
    for (; !next_is(Op::count); list_.pop_front()) run_backward(list_.front(), loss);
  });
  begun_.reset();
  run_ahead_.end();
  end_phase();
}

void Executor::run_backward(const sharding::Instruction& instruction, const autograd::Var& loss) {
  switch (instruction.op) {
    case Op::share_loss:
      return loss_.share();
    case Op::begin_update:
      return parts_.update.begin_early();
    case Op::backward:
      pass_.begin_backward(loss, parts_.update.seed());
      begun_ = instruction;  // from here on it cannot be tried again
      // Where all gradients are needed before any weight changes, none of them is taken up here.
      while (pass_.continue_backward())
        parts_.update.gradients_complete(parts_.sharded.gradients().take_complete(),
                                         [this] { return loss_.mean(); });
      if (pass_.last()) report_.early_updates = parts_.update.updated_chunks();
      return;
    case Op::reduce:
      pass_.end();
      if (pass_.last()) parts_.sharded.finish_gradients();
      return parts_.update.gradients_complete(parts_.sharded.gradients().take_complete(),
                                              [this] { return loss_.mean(); });
    case Op::forward:
    case Op::count:
    case Op::update:
      break;
  }
  fail(ErrorKind::usage, "an instruction that backward() does not run");
}

bool Executor::step() {
  require_not_failed("step()");
  require(next_is(Op::count), "step() follows backward(), once per micro-batch");
  const bool updates = list_.size() > 1;
  if (updates) {
    parts_.sharded.require_no_leases();  // before anything counts, so that it can be tried again
    parts_.update.require_finite(parts_.counters.global_steps);
  }
  list_.pop_front();
  ++parts_.counters.micro_steps;
  ++accumulated_;
  report_.applied = false;
  if (updates) run_update();
  return updates;
}

void Executor::run_update() {
  {
    PhaseTimer timer(times_.update, "update");
    list_.clear();
    try {
      parts_.update.guard(coming_step(), [&] {
        report_.applied = parts_.update.finish(loss_.mean(), coming_step(), report_);
      });
    } catch (...) {
      drop_accumulated();
      throw;
    }
  }
  Counters& counters = parts_.counters;
  if (!report_.applied) ++counters.skipped_steps;
  counters.global_samples += parts_.config.batch.train_batch_size;
  report_.step = ++counters.global_steps;
  drop_accumulated();
  {
    PhaseTimer timer(times_.update, "update");
    end_phase();
  }
  report_.times = std::exchange(times_, {});
}

/// The coming micro-batch is the first of a step.
void Executor::drop_accumulated() {
  accumulated_ = 0;
  loss_.clear();
  parts_.sharded.gradients().clear();
}

void Executor::evaluate(const std::function<void(autograd::Tape&)>& run) {
  const device::TraceRange range("evaluation");
  parts_.update.require_whole_weights("evaluation");
  require_not_failed("evaluation");
  // Between forward() and backward() the gathered units belong to that micro-batch.
  require(idle() || next_is(Op::count),
          "evaluation between forward() and backward(): finish the micro-batch first");
  if (pass_.under_way()) parts_.sharded.abandon_passes();  // of a forward that has failed
  evaluation_.tape().random = key();
  evaluation_.evaluate(run);
}

autograd::Var Executor::evaluate(const tensor::Batch& batch) {
  autograd::Var loss;
  evaluate([&](autograd::Tape& tape) { loss = parts_.model(tape, batch); });
  end_phase();
  return loss;
}

void Executor::abandon_failed() {
  if (failed()) parts_.sharded.abandon_passes();
}

void Executor::reset() {
  pass_.tape().clear();
  list_.clear();
  begun_.reset();
  drop_accumulated();
}

}  // namespace sherd::engine
