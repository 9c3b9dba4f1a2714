#include "sharding/sharded_model.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>

#include "config/config.h"
#include "device/meta.h"
#include "device/trace_range.h"

namespace sherd::sharding {

ShardingOptions make_sharding_options(const config::Config& config, int moments) {
  ShardingOptions options;
  options.placements = make_placements(config);
  options.moments = moments;
  options.seed = config.training.seed;
  options.residency = {config.zero.prefetch_bucket_size, config.zero.max_live_parameters, config.zero.max_reuse_distance};
  options.persistence_threshold = config.zero.param_persistence_threshold;
  options.model_persistence_threshold = config.zero.model_persistence_threshold;
  options.reduce_bucket = config.zero.reduce_bucket_size;
  options.gather_bucket = config.zero.allgather_bucket_size;
  options.overlap = config.zero.overlap_comm;
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
  /// A pass of the block: a range for profilers, and a stretch of work that comes again in every step.
  void begin(const char* pass) {
    owner_.kernels_.device().end_stretch();
    ranges_.emplace_back(pass, units_.front()->name());
  }
  void end() {
    owner_.kernels_.device().end_stretch();
    ranges_.pop_back();
  }
  void let_go() { leases_.resize(leases_.size() - units_.size()); }

  ShardedModel& owner_;
  std::vector<Unit*> units_;
  std::vector<Unit::Lease> leases_;  // a stack: a block may be entered again inside itself
  std::deque<device::TraceRange> ranges_;  // likewise, one for all units
};

ShardedModel::Claim::Claim(const nn::Module* model) {
  require(model != nullptr, "sharding needs a model");
  for (const ParameterPtr& parameter : model->parameters()) {
    if (!parameter->stored.exchange(true)) {
      held_.push_back(parameter);
      continue;
    }
    release();
    fail(ErrorKind::usage,
         "this model, or a part of it, already belongs to another engine or another rank: every rank builds "
         "its own. Build it inside the function that launch() runs, or give initialize() a function that "
         "builds it");
  }
}

void ShardedModel::Claim::release() {
  for (const ParameterPtr& parameter : held_) parameter->stored = false;
}

ShardedModel::ShardedModel(std::shared_ptr<nn::Module> model, const ShardingOptions& options,
                           const StateSources& sources)
    : model_(std::move(model)),
      claim_(model_.get()),
      options_(options),
      sources_(sources),
      group_(sources.group),
      kernels_(sources.kernels),
      residency_(group_, kernels_.device(), options.residency),
      reducer_(group_, options.placements.communication, options.reduce_bucket, options.overlap) {
  model_->assign_names();
  build_units();
  states_.resize(units().size());
  if (group_.size() == 1 && device::stands_for(kernels_.device()) == device::Kind::cuda)
    traffic_ = std::make_unique<GradientTraffic>(kernels_.device());
  residency_.make_reader(sources_.parameter_store, options_.parameter_buffers, options_.parameter_buffer_elements);
  reducer_.listen([this](Segment& segment) {
    if (boundary_ && complete_) complete_(segment);
  });
}

ShardedModel::~ShardedModel() {
  model_->for_each([](nn::Module& module) { module.set_scope(nullptr); });
  for (const auto& scope : scopes_) scope->take_back_leases();
  for (auto& [parameter, unit] : owners_) parameter->value = {}, parameter->grad = {}, parameter->grad_written = false;
  states_.clear();
  traffic_.reset();  // before the gradients that it moves
}

namespace {

/// A block (or the root) with the parameters it is the first to declare, and those it borrows.
struct Territory {
  nn::Module* block;
  std::vector<ParameterPtr> owned;
  std::vector<const autograd::Parameter*> borrowed;
};

void survey(nn::Module& module, std::size_t current, std::vector<Territory>& lands,
            std::unordered_map<const autograd::Parameter*, std::size_t>& owner) {
  if (module.is_block() && lands[current].block != &module) {
    lands.push_back({&module, {}, {}});
    current = lands.size() - 1;
  }
  for (const auto& [name, parameter] : module.own_parameters()) {
    const auto [it, first] = owner.emplace(parameter.get(), current);
    if (first) lands[current].owned.push_back(parameter);
    else if (it->second != current) lands[current].borrowed.push_back(parameter.get());
  }
  for (const auto& [name, child] : module.children()) survey(*child, current, lands, owner);
}

}  // namespace

void ShardedModel::build_units() {
  std::vector<Territory> lands{{model_.get(), {}, {}}};
  std::unordered_map<const autograd::Parameter*, std::size_t> owner;
  survey(*model_, 0, lands, owner);

  Budget budget{options_.model_persistence_threshold, options_.parameters_in_host, 0};
  for (const Territory& land : lands)
    for (const ParameterPtr& parameter : land.owned)
      if (parameter->trainable) budget.offload += options_.optimizer_offload_ratio * static_cast<double>(parameter->numel());
  std::vector<Unit*> unit_of(lands.size(), nullptr);
  for (std::size_t i = 0; i < lands.size(); ++i) {
    if (lands[i].owned.empty()) continue;
    Unit& unit = residency_.add_unit(lands[i].block->path().empty() ? "root" : lands[i].block->path());
    make_segments(unit, lands[i].owned, budget);
    for (const ParameterPtr& parameter : lands[i].owned) {
      owners_.emplace_back(parameter, &unit);
      parameter_count_ += parameter->numel();
    }
    unit_of[i] = &unit;
  }
  for (std::size_t i = 0; i < lands.size(); ++i) {
    std::vector<Unit*> units;
    if (unit_of[i]) units.push_back(unit_of[i]);
    for (const autograd::Parameter* parameter : lands[i].borrowed) {
      Unit* lender = unit_of[owner.at(parameter)];
      if (std::find(units.begin(), units.end(), lender) == units.end()) units.push_back(lender);
    }
    if (units.empty()) continue;
    scopes_.push_back(std::make_shared<BlockScope>(*this, std::move(units)));
    lands[i].block->set_scope(scopes_.back());
  }
}

void ShardedModel::make_segments(Unit& unit, const std::vector<ParameterPtr>& parameters, Budget& budget) {
  std::vector<std::pair<SegmentKey, std::vector<ParameterPtr>>> groups;
  for (const ParameterPtr& parameter : parameters) {
    SegmentKey key;
    key.trainable = parameter->trainable;
    key.persistent = options_.placements.parameters.spread == Spread::sharded &&
                     parameter->numel() <= options_.persistence_threshold && parameter->numel() <= budget.persistent;
    if (key.persistent) budget.persistent -= parameter->numel(), persistent_elements_ += parameter->numel();
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == key; });
    if (group == groups.end()) group = groups.insert(groups.end(), {key, {}});
    group->second.push_back(parameter);
  }
  for (auto& [key, members] : groups) {
    const PlacementTable table = place(key, SegmentLayout(members, group_.size()), budget);
    unit.segments().push_back(std::make_unique<Segment>(unit.name(), key, std::move(members), table, options_.moments,
                                                        options_.seed, sources_));
  }
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
  reducer_.abandon();
  residency_.abandon();
  published_.clear();
  published_elements_ = 0;
  publishing_.clear();
}

void ShardedModel::require_no_leases() const {
  for (const auto& unit : units())
    require(!unit->leased() || unit->gathered_elements() == 0, "a lease on the parameters of '", unit->name(),
            "' is still held: let it go before they change");
}

void ShardedModel::begin_training(bool boundary) {
  abandon_pass();
  boundary_ = boundary;
  for (UnitState& s : states_) s = {};
  residency_.begin(Residency::Pass::train);
}

void ShardedModel::end_training() {
  for (const auto& unit : units())
    require(state(*unit).pending == 0, "backward did not come back through block '", unit->name(),
            "': run backward on the loss of the same forward");
  if (boundary_) submit_left_behind();
  reducer_.finish();
  if (traffic_ && boundary_) traffic_->join();
  if (boundary_) fill_missing_gradients();
  residency_.end();
}

/// What no micro-batch of the step wrote is zero, for whoever reads it first: the norm, or an update that began early.
void ShardedModel::fill_missing_gradients() {
  for (Segment* segment : trainable_segments()) {
    if (is_filled(*segment)) continue;
    kernels_.fill(segment->gradients().tensor(), 0);
    filled_.push_back(segment);
  }
}

/// A block may have run in an earlier micro-batch and not in the last, which is when replicated gradients are reduced.
void ShardedModel::submit_left_behind() {
  for (const auto& unit : units()) {
    if (state(*unit).sent) continue;
    for (const auto& segment : unit->segments())
      if (!segment->gradients_staged() && is_filled(*segment))
        reducer_.submit(*segment, nullptr, false);
  }
}

void ShardedModel::begin_evaluation() {
  abandon_pass();
  residency_.begin(Residency::Pass::evaluate);
}
void ShardedModel::end_evaluation() { residency_.end(); }

bool ShardedModel::is_filled(const Segment& segment) const {
  return std::find(filled_.begin(), filled_.end(), &segment) != filled_.end();
}

void ShardedModel::open_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (s.open) return;
  require(!s.sent, "block '", unit.name(), "' received gradients after they had been sent off: a block that is used "
          "several times inside another block under full recompute cannot be a unit of its own; take mark_block() off it");
  s.open = true;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    std::shared_ptr<const Tensor> full;
    if (segment->gradients_staged()) {
      // Sums over micro-batches form in the lasting shards; over one rank where backward writes, as without staging.
      const bool load = !segment->gradients_sharded() && is_filled(*segment);
      full = traffic_ ? traffic_->open(*segment, load)
                      : residency_.pool().take(segment->layout().padded(), segment->gradients().dtype());
      if (load && !traffic_) segment->load_gradients(*full);
      if (!load) for (const ParameterPtr& parameter : segment->layout().parameters()) parameter->grad_written = false;
    }
    segment->attach_gradients(full ? *full : segment->gradients().tensor());
    s.full.push_back(std::move(full));
  }
}

void ShardedModel::close_gradients(Unit& unit) {
  UnitState& s = state(unit);
  if (!s.open) return;
  require(!complete_ || !boundary_ || !unit.leased() || unit.gathered_elements() == 0, "a lease on the parameters of '",
          unit.name(), "' is held while their update begins: let it go before backward");
  std::size_t next = 0;
  for (const auto& segment : unit.segments()) {
    if (!segment->key().trainable) continue;
    segment->close_gradients();
    std::shared_ptr<const Tensor> full = std::move(s.full[next++]);
    const bool filled = is_filled(*segment);
    if (!filled) filled_.push_back(segment.get());
    if (full && traffic_) traffic_->send(*segment, *std::exchange(full, nullptr));
    if (segment->gradients_staged() || boundary_) reducer_.submit(*segment, full, full != nullptr && filled);
  }
  s = {};
  s.sent = true;
}

tensor::ExactSum ShardedModel::gradient_sum_of_squares() {
  tensor::ExactSum sum;
  fill_missing_gradients();
  std::vector<Tensor> gradients;
  for (Segment* segment : trainable_segments()) gradients.push_back(segment->own_gradients());
  kernels_.sum_of_squares(gradients, sum);
  if (group_.size() == 1) return sum;
  std::vector<std::int64_t> words = sum.to_words();
  Tensor travelling = Tensor::of<std::int64_t>(kernels_.device(), {static_cast<std::int64_t>(words.size())}, words);
  comm::CallOptions options;
  options.label = "gradient norm";
  options.scalar = true;
  group_.all_reduce(travelling, comm::ReduceOp::sum, 1, options).wait();
  std::memcpy(words.data(), tensor::to_host(kernels_.device(), travelling).raw(), travelling.bytes());
  return tensor::ExactSum::from_words(words);
}

void ShardedModel::publish(Segment& segment) {
  if (!segment.gather_after_update()) return;
  published_.push_back({segment.own_parameters(), segment.parameters().tensor()});
  published_elements_ += segment.layout().padded();
  if (published_elements_ >= options_.gather_bucket) flush_published();
}

void ShardedModel::flush_published() {
  if (published_.empty()) return;
  comm::CallOptions options;
  options.label = "updated parameters";
  options.async = options_.overlap;
  publishing_.push_back(group_.all_gather(std::exchange(published_, {}), options));
  published_elements_ = 0;
}

void ShardedModel::end_step() {
  flush_published();
  for (comm::Work& work : publishing_) work.wait();
  publishing_.clear();
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
