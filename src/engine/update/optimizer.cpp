#include "engine/update/optimizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "engine/update/optimizer_spans.h"

namespace sherd::engine {

Optimizer::Optimizer(const config::Optimizer& config, std::uint64_t seed, GroupOf group_of)
    : group_of_(std::move(group_of)), seed_(seed), own_lr_(1 + config.groups.size()) {
  configured_.emplace_back(config);
  for (const config::OptimizerGroup& group : config.groups) configured_.emplace_back(group);
  for (const optim::Hyper& hyper : configured_) {
    const optim::Description rule = optim::describe(hyper);
    const auto known = std::find(rules_.begin(), rules_.end(), rule);
    rule_of_group_.push_back(static_cast<int>(known - rules_.begin()));
    if (known == rules_.end()) rules_.push_back(rule);
  }
  hyper_ = used_ = configured_;
}

namespace {
std::int64_t blocks_before(std::int64_t elements) {
  return elements / optim::quantized_block;
}

std::int64_t blocks_up_to(std::int64_t elements) {
  return (elements + optim::quantized_block - 1) / optim::quantized_block;
}
}  // namespace

UpdateView UpdateView::part(std::int64_t from, std::int64_t to) const {
  const auto range = [&](const tensor::Tensor& x) {
    return x.defined() ? x.range(from - begin, to - begin) : tensor::Tensor();
  };
  UpdateView out{segment, from, range(parameters), range(gradients), range(masters), {}, {}};
  for (const tensor::Tensor& moment : moments) out.moments.push_back(range(moment));
  for (const tensor::Tensor& each : scales)
    out.scales.push_back(each.defined() ? each.range(blocks_before(from - begin), blocks_up_to(to - begin))
                                        : each);
  return out;
}

std::vector<double> Optimizer::rates_of(const std::vector<optim::Hyper>& groups) {
  std::vector<double> out;
  for (const optim::Hyper& hyper : groups) out.push_back(hyper.lr);
  return out;
}

std::size_t Optimizer::group_of(const autograd::Parameter& parameter) const {
  const auto found = group_of_.find(&parameter);
  return found == group_of_.end() ? 0 : static_cast<std::size_t>(found->second);
}

sharding::ShardingOptions Optimizer::sharding_options(const config::Config& config) const {
  sharding::ShardingOptions options = sharding::make_sharding_options(config);
  options.rules.clear();
  for (const optim::Description& rule : rules_) {
    options.rules.push_back({rule.states});
    if (optim::has_codes(rule)) options.rules.back().block = optim::quantized_block;
  }
  options.rule_of = [by_group = rule_of_group_, groups = group_of_](const autograd::Parameter& parameter) {
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

optim::SpanUpdate Optimizer::span_of(const UpdateView& view, const sharding::Piece& piece,
                                     double factor) const {
  const std::int64_t begin = piece.flat_begin - view.begin, end = begin + piece.count;
  const sharding::MasterForm form = view.segment->master_form();
  const autograd::Parameter& parameter = *view.segment->layout().parameters()[piece.slot];
  const tensor::Tensor weights = view.parameters.range(begin, end);
  optim::SpanUpdate span;
  switch (form) {
    case sharding::MasterForm::in_parameters:
      span.master = weights.data<float>();
      break;
    case sharding::MasterForm::separate:
      span.master = view.masters.range(begin, end).data<float>();
      break;
    case sharding::MasterForm::split:
      span.low = view.masters.range(begin, end).data<std::uint16_t>();
      break;
  }
  if (form != sharding::MasterForm::in_parameters)
    span.param = weights.raw(), span.param_dtype = weights.dtype();
  span.grad = view.gradients.range(begin, end).raw();
  span.grad_dtype = view.gradients.dtype();
  for (std::size_t i = 0; i < view.moments.size() && i < std::size(span.moments); ++i) {
    span.moments[i] = view.moments[i].range(begin, end).raw();
    span.moment_dtype = view.moments[i].dtype();
    if (i < view.scales.size() && view.scales[i].defined())
      span.scales[i] = view.scales[i].range(blocks_before(begin), blocks_up_to(end)).data<float>();
  }
  span.rounding = {seed_, stable_hash(parameter.name)};
  span.n = piece.count;
  span.grad_factor = factor;
  span.decay = parameter.decay;
  return span;
}

const optim::Description& Optimizer::rule_of(const sharding::Segment& segment) const {
  return rules_[static_cast<std::size_t>(segment.key().rule)];
}

void Optimizer::begin_step(double norm) {
  ++steps_;
  used_ = moves_ = hyper_;
  for (optim::Hyper& hyper : moves_)
    if (hyper.type == config::OptimizerType::muon) hyper = optim::step_rule(hyper);
  norm_ = norm;
  norms_.begin(), momentum_.begin();
  matrices_.clear();
}

bool Optimizer::measures() const {
  return std::any_of(rules_.begin(), rules_.end(), optim::measures);
}

Optimizer::OnGpu& Optimizer::on_gpu(device::Device& device) {
  if (!gpu_) gpu_ = std::make_shared<OnGpu>(device::as_cuda(device));
  return *gpu_;
}

bool Optimizer::update(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  const bool finite = move_weights(view, factor, kernels);
  if (view.end() == view.segment->update_end()) matrices_.drop(*view.segment);
  return finite;
}

bool Optimizer::move_weights(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  if (device.kind() == device::Kind::meta) {
    if (device::stands_for(device) == device::Kind::cuda && UpdateStaging::by_processor(*view.segment))
      UpdateStaging::book(device, view);
    return true;
  }
  const auto for_each = [&](const UpdateView& part, const auto& visit) {
    const optim::Description& rule = rule_of(*part.segment);
    if (optim::takes_matrices(rule))
      for_each_matrix_span(part, kept_directions(*part.segment, device), visit);
    else if (optim::measures(rule))
      for_each_tensor_span(part, factor,
                           [&](std::size_t group, const auto&, const optim::SpanUpdate& span,
                               std::int64_t begin) { visit(group, span, begin); });
    else
      for_each_span(part, factor, visit);
  };
  const auto by_processor = [&](const UpdateView& part) {
    bool finite = true;
    const PackedMomentum* momentum = agreed_of(*part.segment, device);
    for_each(part, [&](std::size_t group, const optim::SpanUpdate& span, std::int64_t begin) {
      if (!momentum) {
        finite = optim::update(span, moves_[group], steps_, device.arena()) && finite;
        return;
      }
      for_each_agreed(*momentum, part, span, begin,
                      [&](const optim::SpanUpdate& run, const optim::AgreedMomentum& agreed, auto) {
                        finite =
                            optim::update_agreed(run, agreed, used_[group], steps_, device.arena()) && finite;
                      });
    });
    return finite;
  };
  if (device.kind() == device::Kind::cpu) return by_processor(view);
  OnGpu& gpu = on_gpu(device);
  if (UpdateStaging::by_processor(*view.segment)) return gpu.staging.run(by_processor);
  if (const PackedMomentum* momentum = agreed_of(*view.segment, device)) {
    for_each(view, [&](std::size_t group, const optim::SpanUpdate& span, std::int64_t begin) {
      for_each_agreed(*momentum, view, span, begin,
                      [&](const optim::SpanUpdate& run, const optim::AgreedMomentum& agreed, auto) {
                        optim::update_agreed(run, agreed, used_[group], steps_, device, gpu.check);
                      });
    });
  } else {
    std::map<std::size_t, std::vector<optim::SpanUpdate>> by_group;  // a kernel takes spans of one Hyper
    for_each(view, [&](std::size_t group, const optim::SpanUpdate& span, auto) {
      by_group[group].push_back(span);
    });
    for (const auto& [group, spans] : by_group)
      optim::update(spans, moves_[group], steps_, device, gpu.check);
  }
  if (view.segment->parameters().stored()) device.synchronize();  // the store is going to read them
  return true;
}

/// What the segment is updated by in place of gradients, where refresh() has not taken it; null: by these.
const PackedMomentum* Optimizer::agreed_of(const sharding::Segment& segment, device::Device& device) {
  return exchanges_momentum(segment, steps_) && !optim::refreshes(rule_of(segment))
             ? &momentum_.of(segment, device)
             : nullptr;
}

void Optimizer::announce(const UpdateView& view, const device::Event& ready, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  if (device.kind() == device::Kind::cuda && UpdateStaging::by_processor(*view.segment))
    on_gpu(device).staging.announce(view, ready);
}

void Optimizer::join() {
  if (gpu_) gpu_->staging.join();
}

void Optimizer::end_series() noexcept {
  matrices_.clear();
  if (gpu_) gpu_->staging.end_series();
}

bool Optimizer::finite() {
  return !gpu_ || gpu_->check.finite();
}

}  // namespace sherd::engine
