#include "sharding/sharded_model.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "config/config.h"
#include "device/meta.h"
#include "device/trace_range.h"

namespace sherd::sharding {

ShardingOptions make_sharding_options(const config::Config& config, int moments) {
  ShardingOptions options;
  options.placements = make_placements(config);
  options.rules = {{moments}};
  options.seed = config.training.seed;
  options.residency = {config.zero.prefetch_bucket_size, config.zero.max_live_parameters,
                       config.zero.max_reuse_distance};
  options.persistence_threshold = config.zero.param_persistence_threshold;
  options.model_persistence_threshold = config.zero.model_persistence_threshold;
  options.reduce_bucket = config.zero.reduce_bucket_size;
  options.gather_bucket = config.zero.allgather_bucket_size;
  options.overlap = config.zero.overlap_comm;
  options.reduction = config.parallel.reduction == config::Reduction::native ? comm::Reduction::native
                                                                             : comm::Reduction::ordered;
  options.optimizer_offload_ratio = config.zero.offload_optimizer.ratio;
  options.parameters_in_host = config.zero.offload_param.max_in_cpu;
  options.parameter_buffers = static_cast<int>(config.zero.offload_param.buffer_count);
  options.parameter_buffer_elements = config.zero.offload_param.buffer_size;
  return options;
}

/// Takes the leases of one block: its own unit, and units elsewhere whose parameters it shares.
class ShardedModel::BlockScope final : public autograd::Scope {
 public:
  BlockScope(ShardedModel& owner, std::vector<Unit*> units) : owner_(owner), units_(std::move(units)) {}

  void pre_forward(bool recording) override {
    begin("forward");
    for (Unit* unit : units_) {
      leases_.push_back(unit->gather());
      if (recording && unit->trainable()) ++owner_.state(*unit).pending;
    }
  }
  void post_forward(bool) override {
    let_go();
    end();
  }
  void pre_backward() override {
    begin("backward");
    for (Unit* unit : units_) {
      leases_.push_back(unit->gather());
      if (unit->trainable()) owner_.open_gradients(*unit);
    }
  }
  void post_backward() override {
    let_go();
    for (Unit* unit : units_)
      if (unit->trainable() && --owner_.state(*unit).pending == 0) owner_.close_gradients(*unit);
    end();
  }
  void take_back_leases() {
    leases_.clear();
    ranges_.clear();
  }

 private:
  /// A pass of the block: a range for profilers, and a sequence of work that comes again in every step.
  void begin(const char* pass) {
    owner_.kernels_.device().end_sequence();
    ranges_.emplace_back(pass, units_.front()->name());
  }
  void end() {
    owner_.kernels_.device().end_sequence();
    ranges_.pop_back();
  }
  void let_go() { leases_.resize(leases_.size() - units_.size()); }

  ShardedModel& owner_;
  std::vector<Unit*> units_;
  std::vector<Unit::Lease> leases_;        // a stack: a block may be entered again inside itself
  std::deque<device::TraceRange> ranges_;  // likewise, one for all units
};

ShardedModel::ShardedModel(std::shared_ptr<nn::Module> model, const ShardingOptions& options,
                           const StateSources& sources)
    : model_(std::move(model)),
      claim_(model_.get()),
      options_(options),
      sources_(sources),
      model_ranks_(sources.model_ranks ? *sources.model_ranks : *sources.groups.shard),
      kernels_(sources.kernels),
      residency_(kernels_.device(), options.residency) {
  model_->assign_names();
  build_units();
  states_.resize(units().size());
  if (model_ranks_.size() == 1 && device::stands_for(kernels_.device()) == device::Kind::cuda)
    traffic_ = std::make_unique<GradientTraffic>(kernels_.device());
  residency_.make_readers(sources_.parameter_store, options_.parameter_buffers,
                          options_.parameter_buffer_elements);
}

ShardedModel::~ShardedModel() {
  model_->for_each([](nn::Module& module) { module.set_scope(nullptr); });
  for (const auto& scope : scopes_) scope->take_back_leases();
  for (auto& [parameter, unit] : owners_)
    parameter->value = {}, parameter->grad = {}, parameter->grad_written = false;
  states_.clear();
  traffic_.reset();  // before the gradients that it moves
}

void ShardedModel::build_units() {
  const std::vector<BlockParameters> blocks = assign_parameters(*model_);
  Budget budget{options_.model_persistence_threshold, options_.parameters_in_host, 0};
  for (const BlockParameters& block : blocks)
    for (const ParameterPtr& parameter : block.owned)
      if (parameter->trainable)
        budget.offload += options_.optimizer_offload_ratio * static_cast<double>(parameter->numel());
  std::vector<Unit*> unit_of(blocks.size(), nullptr);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].owned.empty()) continue;
    Unit& unit = residency_.add_unit(blocks[i].block->path().empty() ? "root" : blocks[i].block->path());
    make_segments(unit, blocks[i].owned, budget);
    for (const ParameterPtr& parameter : blocks[i].owned) {
      owners_.emplace_back(parameter, &unit);
      parameter_count_ += parameter->numel();
    }
    unit_of[i] = &unit;
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::vector<Unit*> units;
    if (unit_of[i]) units.push_back(unit_of[i]);
    for (const std::size_t lender : blocks[i].lenders) units.push_back(unit_of[lender]);
    if (units.empty()) continue;
    scopes_.push_back(std::make_shared<BlockScope>(*this, std::move(units)));
    blocks[i].block->set_scope(scopes_.back());
  }
}

void ShardedModel::make_segments(Unit& unit, const std::vector<ParameterPtr>& parameters, Budget& budget) {
  std::vector<std::pair<SegmentKey, std::vector<ParameterPtr>>> segments;
  for (const ParameterPtr& parameter : parameters) {
    SegmentKey key;
    key.trainable = parameter->trainable;
    key.groups = sources_.groups_of ? sources_.groups_of(*parameter) : sources_.groups;
    key.rule = options_.rule_of ? options_.rule_of(*parameter) : 0;
    key.persistent = options_.placements.parameters.spread == Spread::sharded &&
                     parameter->numel() <= options_.persistence_threshold &&
                     parameter->numel() <= budget.persistent;
    if (key.persistent) budget.persistent -= parameter->numel(), persistent_elements_ += parameter->numel();
    auto same = std::find_if(segments.begin(), segments.end(), [&](const auto& s) { return s.first == key; });
    if (same == segments.end()) same = segments.insert(segments.end(), {key, {}});
    same->second.push_back(parameter);
  }
  for (auto& [key, members] : segments) {
    const StateFormat& format = options_.rules.at(static_cast<std::size_t>(key.rule));
    const PlacementTable table =
        place(key, SegmentLayout(members, key.groups.shards(), format.block), budget);
    unit.segments().push_back(std::make_unique<Segment>(unit.name(), key, std::move(members), table, format,
                                                        options_.seed, sources_));
    add_reducer(key.groups);
  }
}

void ShardedModel::add_reducer(const ParameterGroups& groups) {
  for (const Reducer& reducer : reducers_)
    if (reducer.groups() == groups) return;
  const ReducerOptions how{options_.placements.communication, options_.reduce_bucket, options_.overlap,
                           options_.reduction};
  reducers_.emplace_back(groups, kernels_, how, reducer_stats_);
  reducers_.back().listen([this](Segment& segment) { tell_complete(segment); });
  for (const Publisher& publisher : publishers_)
    if (&publisher.group() == groups.shard) return;
  publishers_.emplace_back(*groups.shard, options_.gather_bucket, options_.overlap);
}

Reducer& ShardedModel::reducer_of(const Segment& segment) {
  return *std::find_if(reducers_.begin(), reducers_.end(),
                       [&](const Reducer& reducer) { return reducer.groups() == segment.groups(); });
}

void ShardedModel::tell_complete(Segment& segment) {
  if (boundary_ && complete_) complete_(segment);
}

/// The table's row for one segment: what the limits of the tiers leave of it.
PlacementTable ShardedModel::place(const SegmentKey& key, const SegmentLayout& layout, Budget& budget) const {
  PlacementTable table = options_.placements;
  if (table.parameters.tier == device::Tier::nvme && !key.persistent && layout.shard() <= budget.host) {
    table.parameters.tier = device::Tier::host;
    budget.host -= layout.shard();
  }
  if (key.trainable && table.masters.tier != device::Tier::device) {
    if (budget.offload <= 0)
      table.masters.tier = table.moments.tier = table.gradients.tier = device::Tier::device;
    budget.offload -= static_cast<double>(layout.payload());
  }
  return table;
}

std::vector<Segment*> ShardedModel::trainable_segments() const {
  std::vector<Segment*> out;
  for (const auto& unit : units())
    for (const auto& segment : unit->segments())
      if (segment->key().trainable) out.push_back(segment.get());
  return out;
}

void ShardedModel::abandon_pass() {
  for (const auto& scope : scopes_) scope->take_back_leases();
  for (Reducer& reducer : reducers_) reducer.abandon();
  residency_.abandon();
  for (Publisher& publisher : publishers_) publisher.abandon();
}

void ShardedModel::require_no_leases() const {
  for (const auto& unit : units())
    require(!unit->leased() || unit->gathered_elements() == 0, "a lease on the parameters of '", unit->name(),
            "' is still held: let it go before they change");
}

void ShardedModel::begin_training(bool boundary) {
  abandon_pass();
  boundary_ = boundary;
  for (Reducer& reducer : reducers_) reducer.begin(boundary);
  for (UnitState& s : states_) s = {};
  residency_.begin(Residency::Pass::train);
}

void ShardedModel::end_training() {
  for (const auto& unit : units())
    require(state(*unit).pending == 0, "backward did not come back through block '", unit->name(),
            "': run backward on the loss of the same forward");
  if (boundary_) submit_left_behind();
  for (Reducer& reducer : reducers_) reducer.finish();
  if (traffic_ && boundary_) traffic_->join();
  if (boundary_) fill_missing_gradients();
  residency_.end();
}

/// What no micro-batch of the step wrote is zero, for whoever reads it first: the norm, or an update that
/// began early.
void ShardedModel::fill_missing_gradients() {
  for (Segment* segment : trainable_segments()) {
    if (is_filled(*segment)) continue;
    kernels_.fill(segment->gradients().tensor(), 0);
    filled_.push_back(segment);
  }
}

/// A block may have run in an earlier micro-batch and not in the last, which is when replicated gradients are
/// reduced, and replicas agree.
void ShardedModel::submit_left_behind() {
  for (const auto& unit : units()) {
    if (state(*unit).sent) continue;
    for (const auto& segment : unit->segments()) {
      if (!is_filled(*segment)) continue;
      if (segment->folds_gradients())
        reducer_of(*segment).submit_sum(*segment);
      else
        reducer_of(*segment).submit(*segment, nullptr, false);
    }
  }
}

void ShardedModel::begin_evaluation() {
  abandon_pass();
  residency_.begin(Residency::Pass::evaluate);
}
void ShardedModel::end_evaluation() {
  residency_.end();
}

bool ShardedModel::is_filled(const Segment& segment) const {
  return std::find(filled_.begin(), filled_.end(), &segment) != filled_.end();
}

void ShardedModel::open_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (s.open) return;
  require(!s.sent, "block '", unit.name(),
          "' received gradients after they had been sent off: a block that is used "
          "several times inside another block under full recompute cannot be a unit of its own; take "
          "mark_block() off it");
  s.open = true;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    s.gradients.push_back(open_gradients(*segment));
    const auto& full = s.gradients.back().full;
    segment->attach_gradients(full ? *full : segment->gradients().tensor());
  }
}

ShardedModel::OpenGradients ShardedModel::open_gradients(Segment& segment) {
  const bool filled = is_filled(segment);
  const bool fold = segment.folds_gradients() && options_.reduction == comm::Reduction::ordered;
  OpenGradients open;
  if (traffic_ && segment.gradients_staged()) open.full = open.sum = traffic_->open(segment, filled);
  // The first micro-batch of a step may write to where the sum forms; what is folded onto it comes from
  // elsewhere.
  if ((segment.gradients_staged() && !open.sum) || (fold && filled))
    open.full =
        residency_.pool(*segment.groups().shard).take(segment.layout().padded(), segment.gradients().dtype());
  const bool in_place = open.full == open.sum;
  if (!in_place || !filled)
    for (const ParameterPtr& parameter : segment.layout().parameters()) parameter->grad_written = false;
  return open;
}

void ShardedModel::close_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (!s.open) return;
  require(!complete_ || !boundary_ || !unit.leased() || unit.gathered_elements() == 0,
          "a lease on the parameters of '", unit.name(),
          "' is held while their update begins: let it go before backward");
  std::size_t next = 0;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    segment->close_gradients();
    send_gradients(*segment, std::move(s.gradients[next++]));
  }
  s = {};
  s.sent = true;
}

/// The gradients of one micro-batch are complete.
void ShardedModel::send_gradients(Segment& segment, OpenGradients open) {
  const bool filled = is_filled(segment);
  if (!filled) filled_.push_back(&segment);
  if (!open.sum) {
    const bool fold = open.full && filled;
    if (segment.folds_gradients() || boundary_)
      reducer_of(segment).submit(segment, std::move(open.full), fold);
    return;
  }
  const DType rounding = options_.placements.communication;
  if (open.full != open.sum || (!filled && rounding != open.sum->dtype()))
    kernels_.fold(*open.full, rounding, *open.sum, open.full != open.sum);
  traffic_->send(segment, *open.sum);
  tell_complete(segment);
}

tensor::ExactSum ShardedModel::gradient_sum_of_squares() {
  tensor::ExactSum sum;
  fill_missing_gradients();
  std::vector<Tensor> gradients;
  for (Segment* segment : trainable_segments())
    if (segment->groups().replica_index() == 0) gradients.push_back(segment->own_gradients());
  kernels_.sum_of_squares(gradients, sum);
  if (model_ranks_.size() == 1) return sum;
  std::vector<std::int64_t> words = sum.to_words();
  Tensor travelling =
      Tensor::of<std::int64_t>(kernels_.device(), {static_cast<std::int64_t>(words.size())}, words);
  comm::CallOptions options;
  options.label = "gradient norm";
  for (const Reducer& reducer : reducers_) options.label += reducer.agreed_on();
  options.scalar = true;
  model_ranks_.all_reduce(travelling, comm::ReduceOp::sum, 1, options).wait();
  std::memcpy(words.data(), tensor::to_host(kernels_.device(), travelling).raw(), travelling.bytes());
  return tensor::ExactSum::from_words(words);
}

void ShardedModel::publish(Segment& segment) {
  for (Publisher& publisher : publishers_)
    if (&publisher.group() == segment.groups().shard) return publisher.publish(segment);
}

void ShardedModel::end_step() {
  for (Publisher& publisher : publishers_) publisher.finish();
  clear_gradients();
}

void ShardedModel::clear_gradients() {
  filled_.clear();
  for (auto& [parameter, unit] : owners_) parameter->grad_written = false;
}

Unit::Lease ShardedModel::gather(const autograd::Parameter& parameter) {
  for (auto& [known, unit] : owners_)
    if (known.get() == &parameter) return unit->gather();
  fail(ErrorKind::usage, "parameter '", parameter.name, "' does not belong to this model");
}

}  // namespace sherd::sharding
