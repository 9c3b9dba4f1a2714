#include "sharding/pass.h"

#include <algorithm>

#include "sharding/sharded_model.h"

namespace sherd::sharding {

// ---- what a block does on the tape of a pass ----

Pass& Block::pass_of(autograd::Tape& tape) {
  return owner_.pass_of(tape);
}

void Block::announce(autograd::Tape&) {
  for (Unit* unit : units_)
    if (unit->on_demand()) owner_.residency_.announce(*unit);
}

void Block::pre_forward(autograd::Tape& tape) {
  Pass& pass = pass_of(tape);
  require(!tape.recording() || pass.under_way_,
          "the model was run outside of a pass and is recorded: call it through Engine::forward(), or under "
          "autograd::Tape::NoGrad");
  pass.enter("forward", units_);
  if (!tape.recording()) return;
  for (Unit* unit : units_) {
    if (unit->trainable()) ++pass.state(*unit).pending;
    if (unit->on_demand()) pass.ran_.push_back(unit);
  }
}

void Block::post_forward(autograd::Tape& tape) {
  pass_of(tape).leave();
}

void Block::pre_backward(autograd::Tape& tape) {
  Pass& pass = pass_of(tape);
  for (const Unit* unit : units_)
    if (unit->on_demand()) pass.announce_next(*unit);
  pass.enter("backward", units_);
  for (Unit* unit : units_)
    if (unit->trainable()) pass.open_gradients(*unit);
}

void Block::post_backward(autograd::Tape& tape) {
  Pass& pass = pass_of(tape);
  pass.zero_pruned_gradients(units_);
  pass.leave();
}

void Block::pre_weight_gradients(autograd::Tape& tape) {
  Pass& pass = pass_of(tape);
  for (Unit* unit : units_)
    if (unit->trainable()) pass.attach_gradients(*unit);
  pass.lease_pruned(units_);
}

void Block::gradients_complete(autograd::Tape& tape) {
  Pass& pass = pass_of(tape);
  if (!pass.pruned_.empty()) pass.zero_pruned_gradients(units_);
  pass.pruned_.clear();
  for (Unit* unit : units_)
    if (unit->trainable() && --pass.state(*unit).pending == 0) pass.close_gradients(*unit);
}

// ---- the pass ----

Pass::Pass(ShardedModel& model) : model_(model), tape_(model.kernels_), units_(model.units().size()) {
  model_.passes_.push_back(this);
}

Pass::~Pass() {
  std::replace(model_.attached_.begin(), model_.attached_.end(), this, static_cast<Pass*>(nullptr));
  std::erase(model_.passes_, this);
}

void Pass::begin(const Chunk& parts, bool last) {
  require(parts.begin < parts.end && model_.has_parts(parts), "a pass through parts [", parts.begin, ", ",
          parts.end, "), which this rank does not have");
  model_.begin_pass(*this, Residency::Mode::train);
  parts_ = parts;
  last_ = last;
  ran_.clear();
  tape_.clear();
  for (UnitState& unit : units_) unit = {};
}

void Pass::begin_backward(const autograd::Var& loss, double seed, autograd::WeightGradients when) {
  tape_.begin_backward(loss, seed, when);
}

void Pass::begin_backward(const std::vector<autograd::OutputGradient>& outputs,
                          autograd::WeightGradients when) {
  tape_.begin_backward(outputs, when);
}

void Pass::end() {
  for (const auto& unit : model_.units())
    require(state(*unit).pending == 0, "backward did not come back through block '", unit->name(),
            "': run backward on the loss of the same forward");
  model_.gradients_.settle();
  model_.end_pass(*this);
}

void Pass::evaluate(const std::function<void(autograd::Tape&)>& run) {
  autograd::Tape::NoGrad no_grad(tape_);
  tape_.training = false;
  model_.begin_pass(*this, Residency::Mode::evaluate);
  try {
    run(tape_);
    tape_.drop_shared_values();
    model_.end_pass(*this);
  } catch (...) {
    tape_.drop_shared_values();
    try {
      model_.abandon_passes();  // a step may follow, and no lease may last until then
    } catch (const Error&) {
      // Peers that failed as well; the first error is the one to tell.
    }
    throw;
  }
}

void Pass::abandon() {
  running_.clear();
  pruned_.clear();
  under_way_ = false;
}

/// A block's work is a range for profilers, and a sequence of kernels that comes again in every step.
void Pass::enter(const char* direction, const Units& units) {
  tape_.device().end_sequence();
  Running& block = running_.emplace_back(direction, units.front()->name());
  // Products of texts that go on are not in FP8, so their weights are not either.
  const bool exact = tape_.key_cache != nullptr;
  for (Unit* unit : units) block.leases.push_back(unit->gather(exact));
}

/// Backward comes to units on demand in the reverse order, so that it is known which are next.
void Pass::announce_next(const Unit& unit) {
  constexpr std::size_t ahead = 2;
  while (!ran_.empty() && ran_.back() != &unit) ran_.pop_back();
  if (!ran_.empty()) ran_.pop_back();
  for (std::size_t i = 0; i < std::min(ahead, ran_.size()); ++i)
    model_.residency_.announce(*ran_[ran_.size() - 1 - i]);
}

void Pass::leave() {
  running_.back().leases.clear();
  tape_.device().end_sequence();
  running_.pop_back();
}

bool Pass::completes(const Unit& unit) const {
  const std::size_t lowest = model_.lowest_part(unit);
  return last_ && parts_.begin <= lowest && lowest < parts_.end;
}

void Pass::open_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (!s.open) {
    require(!s.sent, "block '", unit.name(),
            "' received gradients after they had been sent off: a block that is used several times inside "
            "another block under full recompute cannot be a unit of its own; take mark_block() off it");
    s.open = true;
    for (const auto& segment : unit.segments())
      if (segment->key().trainable)
        s.gradients.push_back(
            model_.gradients_.open(*segment, model_.residency_.pool(*segment->groups().shard)));
  }
  attach_gradients(unit);
}

/// The unit's parameters take the gradients of one pass at a time.
void Pass::attach_gradients(Unit& unit) {
  Pass*& attached = model_.attached_[static_cast<std::size_t>(unit.index())];
  if (attached == this) return;
  if (attached) attached->detach_gradients(unit);
  attached = this;
  std::size_t next = 0;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    Gradients::Open& open = state(unit).gradients[next++];
    segment->attach_gradients(open.full ? *open.full : segment->gradients().tensor(), open.fold, open.onto);
    for (std::size_t i = 0; i < open.written.size(); ++i) {
      autograd::Parameter& parameter = *segment->layout().parameters()[i];
      parameter.sources_written = open.written[i] == Gradients::Written::by_source;
      parameter.grad_written = parameter.sources_written || open.written[i] == Gradients::Written::apart;
      parameter.grad_sum.folded = open.written[i] == Gradients::Written::folded;
    }
    open.written.clear();
  }
}

void Pass::detach_gradients(Unit& unit) {
  std::size_t next = 0;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    Gradients::Open& open = state(unit).gradients[next++];
    require(!open.sum, "two micro-batches have gradients of block '", unit.name(),
            "' open, and its gradients leave the GPU: run one backward, with its weight gradients, after the "
            "other");
    if (open.shared) continue;
    for (const ParameterPtr& parameter : segment->layout().parameters())
      open.written.push_back(parameter->grad_sum.folded   ? Gradients::Written::folded
                             : parameter->sources_written ? Gradients::Written::by_source
                             : parameter->grad_written    ? Gradients::Written::apart
                                                          : Gradients::Written::nowhere);
  }
}

void Pass::lease_pruned(const Units& units) {
  for (Unit* unit : units)
    if (unit->has_pruned()) pruned_.push_back(unit->gather());
}

/// Here, as the weights are leased, which tell the pruned ones; and before gradients are rounded, summed over
/// ranks and counted in a norm.
void Pass::zero_pruned_gradients(const Units& units) {
  for (Unit* unit : units)
    for (const auto& segment : unit->segments())
      if (segment->key().trainable) segment->zero_pruned_gradients();
}

void Pass::close_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (!s.open) return;
  attach_gradients(unit);
  model_.attached_[static_cast<std::size_t>(unit.index())] = nullptr;
  std::size_t next = 0;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    const std::vector<Segment::Range> apart = segment->close_gradients();
    model_.gradients_.close(*segment, std::move(s.gradients[next++]), completes(unit), apart);
  }
  s = {};
  s.sent = true;
}

}  // namespace sherd::sharding
