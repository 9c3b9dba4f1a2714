#include "sharding/sharded_model.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <set>
#include <utility>

#include "config/config.h"
#include "device/trace_range.h"
#include "nn/layered_model.h"

namespace sherd::sharding {

ShardingOptions make_sharding_options(const config::Config& config) {
  ShardingOptions options;
  options.placements = make_placements(config);
  options.seed = config.training.seed;
  options.residency = {config.zero.prefetch_bucket_size, config.zero.max_live_parameters,
                       config.zero.max_reuse_distance};
  options.persistence_threshold = config.zero.param_persistence_threshold;
  options.model_persistence_threshold = config.zero.model_persistence_threshold;
  options.reduce_bucket = config.zero.reduce_bucket_size;
  options.gather_bucket = config.zero.allgather_bucket_size;
  options.overlap = config.zero.overlap_comm;
  options.gather_in_fp8 = config.fp8.gathers();
  options.reduction = config.parallel.reduction;
  options.optimizer_offload_ratio = config.zero.offload_optimizer.ratio;
  options.parameters_in_host = config.zero.offload_param.max_in_cpu;
  options.parameter_buffers = static_cast<int>(config.zero.offload_param.buffer_count);
  options.parameter_buffer_elements = config.zero.offload_param.buffer_size;
  return options;
}

namespace {
ShardingOptions with_parts(ShardingOptions options, std::size_t parts) {
  if (options.parts.empty()) options.parts = {{0, parts}};
  for (const Chunk& chunk : options.parts)
    require(chunk.begin < chunk.end && chunk.end <= parts, "parts [", chunk.begin, ", ", chunk.end,
            ") of a model of ", parts);
  return options;
}
}  // namespace

namespace {
/// Then ranks reduce different things, as the stages of a pipeline do.
bool shares_out_experts(const nn::Module& model) {
  const std::vector<ParameterPtr> all = model.parameters();
  return std::any_of(all.begin(), all.end(),
                     [](const auto& parameter) { return parameter->expert_rank >= 0; });
}
}  // namespace

ShardedModel::ShardedModel(std::shared_ptr<nn::Module> model, const ShardingOptions& options,
                           const StateSources& sources)
    : model_(std::move(model)),
      layered_(dynamic_cast<nn::LayeredModel*>(model_.get())),
      claim_(model_.get()),
      options_(with_parts(options, parts())),
      sources_(sources),
      kernels_(sources.kernels),
      residency_(kernels_.device(), options.residency),
      gradients_(kernels_, sources.model_ranks ? *sources.model_ranks : *sources.groups.shard,
                 {options.placements.communication, options.reduce_bucket, options.overlap, options.reduction,
                  !has_parts({0, parts()}) || shares_out_experts(*model_)}) {
  model_->assign_names();
  if (options_.claimed) options_.claimed();
  find_own_parameters();
  build_units();
  find_lowest_parts();
  attached_.resize(units().size());
  residency_.make_readers(sources_.parameter_store, options_.parameter_buffers,
                          options_.parameter_buffer_elements);
}

ShardedModel::~ShardedModel() {
  model_->for_each([](nn::Module& module) { module.set_scope(nullptr); });
  for (std::size_t part = 0; layered_ && part < parts(); ++part) layered_->set_part_scope(part, nullptr);
  for (Pass* pass : passes_) pass->abandon();
  for (auto& [key, owned] : owners_) {
    autograd::Parameter& parameter = *owned.first;
    parameter.value = {}, parameter.grad = {}, parameter.grad_sum = {}, parameter.grad_written = false;
  }
}

void ShardedModel::build_units() {
  const std::vector<BlockParameters> blocks = assign_parameters(*model_);
  find_persistent(blocks);
  Budget budget{options_.parameters_in_host, 0};
  for (const BlockParameters& block : blocks)
    for (const ParameterPtr& parameter : block.owned)
      if (parameter->trainable && has(parameter))
        budget.offload += options_.optimizer_offload_ratio * static_cast<double>(parameter->numel());
  std::vector<Unit*> unit_of(blocks.size(), nullptr);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::vector<ParameterPtr> own;
    for (const ParameterPtr& parameter : blocks[i].owned)
      if (has(parameter)) own.push_back(parameter);
    if (own.empty()) continue;
    Unit& unit =
        residency_.add_unit(name_of(blocks[i], *model_), blocks[i].block && blocks[i].block->is_on_demand());
    make_segments(unit, own, budget);
    for (const ParameterPtr& parameter : own) {
      owners_.emplace(parameter.get(), std::pair(parameter, &unit));
      parameter_count_ += parameter->numel();
    }
    unit_of[i] = &unit;
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::vector<Unit*> units;
    if (unit_of[i]) units.push_back(unit_of[i]);
    for (const std::size_t lender : blocks[i].lenders)
      if (unit_of[lender]) units.push_back(unit_of[lender]);
    if (units.empty()) continue;
    blocks_.push_back(std::make_shared<Block>(*this, std::move(units)));
    if (blocks[i].part)
      layered_->set_part_scope(*blocks[i].part, blocks_.back());
    else
      blocks[i].block->set_scope(blocks_.back());
  }
}

void ShardedModel::find_own_parameters() {
  const auto visit = [&](bool own, const auto& each) {
    for (std::size_t part = 0; layered_ && part < parts(); ++part)
      for (const auto& module : layered_->modules(part))
        if (has_parts({part, part + 1}) == own)
          for (const ParameterPtr& parameter : module->parameters()) each(parameter.get());
  };
  visit(false, [&](const autograd::Parameter* parameter) { elsewhere_.insert(parameter); });
  visit(true, [&](const autograd::Parameter* parameter) { elsewhere_.erase(parameter); });
  for (const ParameterPtr& parameter : model_->parameters())
    if (parameter->expert_rank >= 0 && parameter->expert_rank != options_.expert_rank)
      elsewhere_.insert(parameter.get());
}

bool ShardedModel::has_parts(const Chunk& parts) const {
  for (std::size_t part = parts.begin; part < parts.end; ++part)
    if (std::none_of(options_.parts.begin(), options_.parts.end(),
                     [&](const Chunk& own) { return own.begin <= part && part < own.end; }))
      return false;
  return true;
}

std::vector<Unit*> ShardedModel::units_of(const Chunk& parts) const {
  if (!layered_ || parts == Chunk{0, this->parts()}) {
    std::vector<Unit*> all;
    for (const auto& unit : units()) all.push_back(unit.get());
    return all;
  }
  std::set<int> indices;
  for (std::size_t part = parts.begin; part < parts.end; ++part)
    for (const auto& module : layered_->modules(part))
      for (const ParameterPtr& parameter : module->parameters())
        if (has(parameter)) indices.insert(unit_of(*parameter).index());
  std::vector<Unit*> out;
  for (const int index : indices) out.push_back(units()[static_cast<std::size_t>(index)].get());
  return out;
}

void ShardedModel::find_lowest_parts() {
  lowest_parts_.assign(units().size(), options_.parts.front().begin);
  for (auto chunk = options_.parts.rbegin(); layered_ && chunk != options_.parts.rend(); ++chunk)
    for (std::size_t part = chunk->end; part-- > chunk->begin;)
      for (const auto& module : layered_->modules(part))
        for (const ParameterPtr& parameter : module->parameters()) {
          if (!has(parameter)) continue;
          lowest_parts_[static_cast<std::size_t>(unit_of(*parameter).index())] = part;
        }
}

/// Its values have no memory of their own.
static bool in_blocks(const autograd::Parameter& parameter) {
  return parameter.stored_as != StoredFormat::compute && !parameter.trainable;
}

/// The same on all ranks: stages that share a parameter lay it out alike.
void ShardedModel::find_persistent(const std::vector<BlockParameters>& blocks) {
  std::int64_t room = options_.model_persistence_threshold;
  if (options_.placements.parameters.spread != Spread::sharded) return;
  for (const BlockParameters& block : blocks)
    for (const ParameterPtr& parameter : block.owned) {
      const std::int64_t elements = parameter->numel();
      if (elements > options_.persistence_threshold || elements > room) continue;
      if (in_blocks(*parameter)) continue;
      persistent_.insert(parameter.get());
      room -= elements;
    }
}

Unit& ShardedModel::unit_of(const autograd::Parameter& parameter) const {
  if (const auto found = owners_.find(&parameter); found != owners_.end()) return *found->second.second;
  require(
      elsewhere_.count(&parameter) == 0, "parameter '", parameter.name,
      "' is not on this rank: it belongs to parts of the model that other stages of the pipeline have, or "
      "to experts of other ranks (ShardedModel::has() tells)");
  fail(ErrorKind::usage, "parameter '", parameter.name, "' does not belong to this model");
}

void ShardedModel::make_segments(Unit& unit, const std::vector<ParameterPtr>& parameters, Budget& budget) {
  std::vector<std::pair<SegmentKey, std::vector<ParameterPtr>>> segments;
  for (const ParameterPtr& parameter : parameters) {
    SegmentKey key;
    key.trainable = parameter->trainable;
    key.groups = sources_.groups_of ? sources_.groups_of(*parameter) : sources_.groups;
    key.rule = options_.rule_of && parameter->trainable ? options_.rule_of(*parameter) : 0;
    if (in_blocks(*parameter)) key.format = parameter->stored_as;
    key.persistent = persistent_.contains(parameter.get());
    // In FP8 other weights than pruned ones may become −0.
    key.fp8 = options_.gather_in_fp8 && parameter->fp8 && !parameter->pruned && !key.in_blocks() &&
              !key.persistent && options_.placements.parameters.spread == Spread::sharded &&
              key.groups.shards() > 1;
    if (key.persistent) persistent_elements_ += parameter->numel();
    auto same = std::find_if(segments.begin(), segments.end(), [&](const auto& s) { return s.first == key; });
    if (same == segments.end()) same = segments.insert(segments.end(), {key, {}});
    same->second.push_back(parameter);
  }
  for (auto& [key, members] : segments) {
    StateFormat format = options_.rules.at(static_cast<std::size_t>(key.rule));
    if (key.in_blocks()) format.block = std::lcm(layout_alignment, tensor::block_size(key.format).elements);
    const PlacementTable table =
        place(key, SegmentLayout(members, key.groups.shards(), format.block), budget);
    unit.segments().push_back(std::make_unique<Segment>(unit.name(), key, std::move(members), table, format,
                                                        options_.seed, sources_));
    if (key.trainable) gradients_.add(*unit.segments().back());
    add_publisher(*key.groups.shard);
  }
}

void ShardedModel::add_publisher(comm::Communicator& group) {
  for (const Publisher& publisher : publishers_)
    if (&publisher.group() == &group) return;
  publishers_.emplace_back(group, options_.gather_bucket, options_.overlap);
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

Pass& ShardedModel::pass_of(const autograd::Tape& tape) const {
  for (Pass* pass : passes_)
    if (&pass->tape_ == &tape) return *pass;
  fail(ErrorKind::usage,
       "the model is sharded: run it on the tape of one of its passes (Engine::forward(), "
       "Engine::evaluate())");
}

bool ShardedModel::pass_under_way() const {
  return std::any_of(passes_.begin(), passes_.end(), [](const Pass* pass) { return pass->under_way_; });
}

void ShardedModel::begin_list(std::span<const Instruction> gathers, std::span<const Chunk> chunks) {
  abandon_passes();
  in_list_ = true;
  if (gathers.empty()) return residency_.begin(Residency::Mode::train);
  std::vector<int> order, holders(units().size());
  for (const Instruction& i : gathers)
    for (const Unit* unit : units_of(chunks[static_cast<std::size_t>(i.chunk)])) {
      if (unit->on_demand()) continue;
      int& held = holders[static_cast<std::size_t>(unit->index())];
      if (i.op == Instruction::Op::release)
        --held;
      else if (held++ == 0)
        order.push_back(unit->index());
    }
  residency_.begin_list(order);
}

void ShardedModel::end_list() {
  require(in_list_ && !pass_under_way(), "a list ends behind all of its passes");
  in_list_ = false;
  residency_.end();
}

void ShardedModel::begin_pass(Pass& pass, Residency::Mode kind) {
  if (in_list_) {
    require(kind == Residency::Mode::train && !pass.under_way_,
            "a list of instructions is under way: evaluate after it, and begin passes that have ended");
  } else if (pass.under_way_ || !pass_under_way()) {
    abandon_passes();
    residency_.begin(kind);
  }
  pass.under_way_ = true;
}

void ShardedModel::end_pass(Pass& pass) {
  pass.under_way_ = false;
  if (!in_list_ && !pass_under_way()) residency_.end();
}

void ShardedModel::abandon_passes() {
  in_list_ = false;
  for (Pass* pass : passes_) pass->abandon();
  std::fill(attached_.begin(), attached_.end(), nullptr);
  gradients_.abandon();
  residency_.abandon();
  for (Publisher& publisher : publishers_) publisher.abandon();
}

void ShardedModel::require_no_leases() const {
  for (const auto& unit : units())
    require(!unit->leased() || unit->gathered_elements() == 0, "a lease on the parameters of '", unit->name(),
            "' is still held: let it go before they change");
}

void ShardedModel::require_no_leases(const Segment& segment) const {
  for (const auto& unit : units())
    for (const auto& own : unit->segments())
      require(own.get() != &segment || !unit->leased() || unit->gathered_elements() == 0,
              "a lease on the parameters of '", unit->name(),
              "' is held while their update begins: let it go before backward");
}

void ShardedModel::publish(Segment& segment) {
  for (Publisher& publisher : publishers_)
    if (&publisher.group() == segment.groups().shard) return publisher.publish(segment);
}

void ShardedModel::end_step() {
  for (Publisher& publisher : publishers_) publisher.finish();
  gradients_.clear();
  residency_.forget_scales(true);
}

void ShardedModel::end_changes(std::span<Unit* const> units) {
  for (Publisher& publisher : publishers_) publisher.finish();
  residency_.end_changes(units);
}

Unit::Lease ShardedModel::gather(const autograd::Parameter& parameter) {
  return unit_of(parameter).gather(true);
}

}  // namespace sherd::sharding
