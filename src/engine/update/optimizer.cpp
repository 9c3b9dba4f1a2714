#include "engine/update/optimizer.h"

#include <algorithm>
#include <utility>

#include "engine/update/rules/parameter_norms.h"
#include "engine/update/rules/whole_matrices.h"

namespace sherd::engine {

Optimizer::Optimizer(const config::Optimizer& config, std::uint64_t seed, GroupOf group_of)
    : own_lr_(1 + config.groups.size()), norms_(std::make_shared<ParameterNorms>()) {
  context_.seed = seed;
  context_.group_of = std::move(group_of);
  configured_.emplace_back(config);
  for (const config::OptimizerGroup& group : config.groups) configured_.emplace_back(group);
  const SharedByRules shared{norms_, std::make_shared<WholeMatrices>()};
  for (const optim::Hyper& hyper : configured_) {
    const optim::Description rule = optim::describe(hyper);
    const auto known = std::find(rules_.begin(), rules_.end(), rule);
    rule_of_group_.push_back(static_cast<int>(known - rules_.begin()));
    if (known != rules_.end()) continue;
    rules_.push_back(rule);
    updates_.push_back(make_rule_update(rule, context_, shared));
  }
  hyper_ = context_.hyper = configured_;
}

std::vector<double> Optimizer::rates_of(const std::vector<optim::Hyper>& groups) {
  std::vector<double> out;
  for (const optim::Hyper& hyper : groups) out.push_back(hyper.lr);
  return out;
}

sharding::ShardingOptions Optimizer::sharding_options(const config::Config& config) const {
  sharding::ShardingOptions options = sharding::make_sharding_options(config);
  options.rules.clear();
  for (const optim::Description& rule : rules_) {
    options.rules.push_back({rule.states});
    if (optim::has_codes(rule)) options.rules.back().block = optim::quantized_block;
  }
  options.rule_of = [by_group = rule_of_group_,
                     groups = context_.group_of](const autograd::Parameter& parameter) {
    const auto group = groups.find(&parameter);
    return by_group[group == groups.end() ? 0 : static_cast<std::size_t>(group->second)];
  };
  return options;
}

void Optimizer::set_lr(double lr) {
  for (int group = 0; group < groups(); ++group) set_lr(group, lr);
}

void Optimizer::set_lr(int group, double lr) {
  require(group >= 0 && group < groups(), "set_lr: group ", group, " of ", groups());
  hyper_[static_cast<std::size_t>(group)].lr = lr;
  own_lr_[static_cast<std::size_t>(group)] = lr;
}

void Optimizer::reset_lr() {
  follow(rates_of(configured_), {});
}

std::vector<double> Optimizer::lr_proportions() const {
  std::vector<double> out;
  const double base = configured_.front().lr;
  for (const optim::Hyper& hyper : configured_) out.push_back(hyper.lr == base ? 1.0 : hyper.lr / base);
  return out;
}

void Optimizer::follow(const std::vector<double>& lr, const std::optional<std::pair<double, double>>& betas) {
  for (std::size_t group = 0; group < hyper_.size(); ++group) {
    hyper_[group].lr = lr[group];
    if (config::Betas* own = hyper_[group].betas(); own && betas)
      own->beta1 = betas->first, own->beta2 = betas->second;
    own_lr_[group].reset();
  }
}

void Optimizer::begin_step(double norm) {
  ++context_.step;
  context_.hyper = hyper_;
  context_.norm = norm;
  for (const auto& update : updates_) update->begin_step();
}

bool Optimizer::exchanges_momentum(const sharding::Segment& segment, std::int64_t step) const {
  return rule_of(segment).exchanges_momentum(step) && segment.can_exchange_momentum();
}

std::optional<std::int64_t> Optimizer::freeze_step(const sharding::ShardedModel& model) const {
  std::optional<std::int64_t> out;
  for (const sharding::Segment* segment : model.trainable_segments())
    if (segment->can_exchange_momentum()) out = std::max(out, rule_of(*segment).freeze_step);
  return out;
}

void Optimizer::prepare(const sharding::ShardedModel& model, device::Device& device) {
  for (const sharding::Segment* segment : model.trainable_segments())
    update_of(*segment).prepare(*segment, device);
}

void Optimizer::agree(sharding::ShardedModel& model, device::Device& device) {
  const auto hyper_of = [&](const autograd::Parameter& parameter) {
    const std::size_t group = context_.group(parameter);
    return optim::measures(rules_[static_cast<std::size_t>(rule_of_group_[group])]) ? &context_.hyper[group]
                                                                                    : nullptr;
  };
  const bool ratios = std::any_of(rules_.begin(), rules_.end(), [&](const optim::Description& rule) {
    return rule.exchanges_momentum(steps()) && optim::refreshes(rule);
  });
  norms_->share(model, device, steps(), hyper_of, ratios);
}

void Optimizer::end_step() noexcept {
  for (const auto& update : updates_) update->end_step();
  context_.passes.end_series();
}

}  // namespace sherd::engine
