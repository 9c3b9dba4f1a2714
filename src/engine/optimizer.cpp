#include "engine/optimizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/cpu_isa.h"
#include "device/meta.h"
#include "engine/update_staging.h"
#include "optim/device_update.h"

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
/// The processor updates what a GPU computes with.
bool by_processor_beside_gpu(device::Device& device, const sharding::Segment& segment) {
  return device::stands_for(device) == device::Kind::cuda && UpdateStaging::by_processor(segment);
}

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
    if (betas) hyper_[group].beta1 = betas->first, hyper_[group].beta2 = betas->second;
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

namespace {

/// Calls visit(run, first logical element) for the parts of a piece that are updated by themselves: all of
/// it, but where moments are rounded by the element's place in the whole parameter, of which there is a
/// slice.
template <class Visit>
void for_each_run(const UpdateView& view, const sharding::Piece& piece, const Visit& visit) {
  const tensor::Slice slice = view.segment->layout().parameters()[piece.slot]->logical_slice();
  if (slice.is_whole() || view.moments.empty() || view.moments[0].dtype() != DType::bf16)
    return visit(piece, piece.parameter_begin);
  slice.for_each_run(piece.parameter_begin, piece.parameter_begin + piece.count,
                     [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                       const std::int64_t flat = piece.flat_begin + local - piece.parameter_begin;
                       visit(sharding::Piece{piece.slot, local, flat, count}, logical);
                     });
}

}  // namespace

template <class Visit>
void Optimizer::for_each_span(const UpdateView& view, double factor, const Visit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  // A replica that keeps its gradients takes the mean over its own ranks.
  const double own =
      exchanges_momentum(*view.segment, steps_) ? factor * view.segment->groups().replicas() : factor;
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.end())) {
    const autograd::Parameter& parameter = *layout.parameters()[piece.slot];
    const std::size_t group = group_of(parameter);
    const optim::Hyper& hyper = used_[group];
    const bool normalizes = hyper.type == config::OptimizerType::nvlamb && norm_ > hyper.normalize_above;
    for_each_run(view, piece, [&](const sharding::Piece& run, std::int64_t first_element) {
      optim::SpanUpdate span = span_of(view, run, normalizes ? own / norm_ : own);
      span.first_element = first_element;
      if (optim::measures(rules_[static_cast<std::size_t>(rule_of_group_[group])]))
        span.trust = norms_.trust(parameter);
      visit(group, parameter, span, run.flat_begin);
    });
  }
}

template <class Visit>
void Optimizer::for_each_matrix_span(const UpdateView& view, const tensor::Tensor& kept,
                                     const Visit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.end())) {
    const autograd::Parameter& parameter = *layout.parameters()[piece.slot];
    const std::size_t group = group_of(parameter);
    const auto each = [&](std::int64_t begin, std::int64_t count, std::int64_t rows, std::int64_t columns) {
      const std::int64_t flat = piece.flat_begin + begin - piece.parameter_begin;
      optim::SpanUpdate span =
          span_of(view, {piece.slot, begin, flat, count}, optim::step_scale(used_[group], rows, columns));
      const std::int64_t at = flat - view.segment->update_begin();
      span.grad = kept.range(at, at + count).raw(), span.grad_dtype = kept.dtype();
      for (void*& moment : span.moments) moment = nullptr;
      visit(group, parameter, span, flat);
    };
    for_each_shape(parameter, piece.parameter_begin, piece.parameter_begin + piece.count, each);
  }
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

struct Optimizer::OnGpu {
  explicit OnGpu(device::CudaDevice& device) : check(device), staging(device) {}
  optim::FiniteCheck check;
  UpdateStaging staging;
};

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
    if (optim::takes_matrices(rule_of(*part.segment)))
      for_each_matrix_span(part, kept_directions(*part.segment, device), visit);
    else
      for_each_span(part, factor, visit);
  };
  const auto by_processor = [&](const UpdateView& part) {
    bool finite = true;
    const PackedMomentum* momentum = agreed_of(*part.segment, device);
    for_each(part, [&](std::size_t group, const auto&, const optim::SpanUpdate& span, std::int64_t begin) {
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
    for_each(view, [&](std::size_t group, const auto&, const optim::SpanUpdate& span, std::int64_t begin) {
      for_each_agreed(*momentum, view, span, begin,
                      [&](const optim::SpanUpdate& run, const optim::AgreedMomentum& agreed, auto) {
                        optim::update_agreed(run, agreed, used_[group], steps_, device, gpu.check);
                      });
    });
    return true;
  }
  std::map<std::size_t, std::vector<optim::SpanUpdate>> by_group;  // a kernel takes spans of one Hyper
  for_each(view, [&](std::size_t group, const auto&, const optim::SpanUpdate& span, auto) {
    by_group[group].push_back(span);
  });
  for (const auto& [group, spans] : by_group) optim::update(spans, moves_[group], steps_, device, gpu.check);
  if (view.segment->parameters().stored()) device.synchronize();  // the store is going to read them
  return true;
}

void Optimizer::measure(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const bool on_gpu_side = device::stands_for(device) == device::Kind::cuda;
  const bool by_processor = on_gpu_side && UpdateStaging::by_processor(*view.segment);
  if (device.kind() == device::Kind::meta) {
    std::int64_t most = 0;
    for (const sharding::Piece& piece : view.segment->layout().pieces(view.begin, view.end()))
      most = std::max(most, piece.count);
    if (on_gpu_side && !by_processor && most > 0)
      optim::book_measure(device, most, view.moments.front().dtype(), view.moments.size());
    return;
  }
  const auto measure = [&](const UpdateView& all) {
    const sharding::Segment::Range counted = ParameterNorms::counted(*all.segment);
    const std::int64_t begin = std::max(counted.begin, all.begin), end = std::min(counted.end, all.end());
    if (begin >= end) return true;
    for_each_span(
        all.part(begin, end), factor,
        [&](std::size_t group, const autograd::Parameter& parameter, const optim::SpanUpdate& span, auto) {
          optim::NormSums& sums = norms_.of(parameter);
          if (by_processor)
            optim::measure_with(cpu_isa(), span, used_[group], steps_, device.arena(), sums);
          else
            optim::measure(span, used_[group], steps_, kernels, sums);
        });
    return true;
  };
  if (by_processor)
    on_gpu(device).staging.run(measure, false);
  else
    measure(view);
}

/// Where those that update the segment find its directions.
const tensor::Tensor& Optimizer::kept_directions(const sharding::Segment& segment, device::Device& device) {
  const bool beside_gpu = by_processor_beside_gpu(device, segment);
  return matrices_.of(segment, device, beside_gpu ? device::Tier::host : device::Tier::device);
}

bool Optimizer::make_directions(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const tensor::Tensor kept = kept_directions(*view.segment, device);
  const bool beside_gpu = by_processor_beside_gpu(device, *view.segment);
  if (device.kind() == device::Kind::meta) {
    if (beside_gpu) UpdateStaging::book(device, view);
    if (device::stands_for(device) == device::Kind::cuda && !beside_gpu)
      optim::book_directions(device, view.gradients.numel(), kept.dtype());
    return true;
  }
  const auto for_each = [&](const UpdateView& part, const auto& visit) {
    for_each_span(part, factor,
                  [&](std::size_t group, const auto&, const optim::SpanUpdate& span, std::int64_t flat) {
                    const std::int64_t at = flat - view.segment->update_begin();
                    visit(span, used_[group], kept.range(at, at + span.n).raw());
                  });
  };
  const auto by_processor = [&](const UpdateView& part) {
    bool finite = true;
    for_each(part, [&](const optim::SpanUpdate& span, const optim::Hyper& hyper, void* to) {
      finite = optim::directions(span, hyper, steps_, to, kept.dtype(), device.arena()) && finite;
    });
    return finite;
  };
  if (device.kind() == device::Kind::cpu) return by_processor(view);
  if (beside_gpu) return on_gpu(device).staging.run(by_processor, false);
  for_each(view, [&](const optim::SpanUpdate& span, const optim::Hyper& hyper, void* to) {
    optim::directions(span, hyper, steps_, to, kept.dtype(), device, on_gpu(device).check);
  });
  return true;
}

void Optimizer::orthogonalize(tensor::Kernels& kernels) {
  matrices_.orthogonalize(
      [&](const autograd::Parameter& parameter) -> const optim::Hyper& { return used_[group_of(parameter)]; },
      kernels);
}

void Optimizer::share_norms(sharding::ShardedModel& model, device::Device& device) {
  const auto hyper_of = [&](const autograd::Parameter& parameter) {
    const std::size_t group = group_of(parameter);
    return optim::measures(rules_[static_cast<std::size_t>(rule_of_group_[group])]) ? &used_[group] : nullptr;
  };
  const bool ratios = std::any_of(rules_.begin(), rules_.end(), [&](const optim::Description& rule) {
    return rule.exchanges_momentum(steps_) && optim::refreshes(rule);
  });
  norms_.share(model, device, steps_, hyper_of, ratios);
}

/// What the segment is updated by in place of gradients, where refresh() has not taken it; null: by these.
const PackedMomentum* Optimizer::agreed_of(const sharding::Segment& segment, device::Device& device) {
  return exchanges_momentum(segment, steps_) && !optim::refreshes(rule_of(segment))
             ? &momentum_.of(segment, device)
             : nullptr;
}

/// Calls visit(run of the span, what was agreed on there, its first element in the span); no run has a
/// gradient. The error is the last of the view's moments.
template <class Visit>
void Optimizer::for_each_agreed(const PackedMomentum& momentum, const UpdateView& view,
                                const optim::SpanUpdate& span, std::int64_t begin, const Visit& visit) const {
  float* error = view.moments.back().data<float>() + (begin - view.begin);
  momentum.for_each_run(begin, begin + span.n, error,
                        [&](std::int64_t from, std::int64_t to, const optim::AgreedMomentum& agreed) {
                          optim::SpanUpdate run = optim::part_of(span, from - begin, to - from);
                          run.grad = nullptr;
                          visit(run, agreed, from - begin);
                        });
}

std::optional<std::int64_t> Optimizer::freeze_step(const sharding::ShardedModel& model) const {
  std::optional<std::int64_t> out;
  for (const sharding::Segment* segment : model.trainable_segments())
    if (segment->can_exchange_momentum())
      out = std::max(out, rules_[static_cast<std::size_t>(segment->key().rule)].freeze_step);
  return out;
}

void Optimizer::prepare_exchanges(const std::vector<sharding::Segment*>& segments, device::Device& device) {
  for (const sharding::Segment* segment : segments)
    if (segment->can_exchange_momentum()) momentum_.of(*segment, device);
}

void Optimizer::compress(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const bool beside_gpu = by_processor_beside_gpu(device, *view.segment);
  if (device.kind() == device::Kind::meta) {
    if (beside_gpu) UpdateStaging::book(device, view);
    return;
  }
  PackedMomentum& momentum = momentum_.of(*view.segment, device);
  const auto compress = [&](const UpdateView& part) {
    for_each_span(
        part, factor, [&](std::size_t group, const auto&, const optim::SpanUpdate& span, std::int64_t begin) {
          optim::MomentumSpan packs{span.grad, span.grad_dtype, span.grad_factor, used_[group].beta1};
          packs.momentum = static_cast<const float*>(span.moments[0]);
          packs.error = part.moments.back().data<float>() + (begin - part.begin);
          packs.n = span.n;
          momentum.compress(begin, packs, kernels);
        });
    return true;
  };
  if (beside_gpu)
    on_gpu(device).staging.run(compress, false);
  else
    compress(view);
}

void Optimizer::refresh(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const bool beside_gpu = by_processor_beside_gpu(device, *view.segment);
  if (device.kind() == device::Kind::meta) {
    if (beside_gpu) UpdateStaging::book(device, view);
    if (device::stands_for(device) == device::Kind::cuda && !beside_gpu)
      optim::book_refresh(device, view.gradients.numel());
    return;
  }
  const PackedMomentum* momentum =
      exchanges_momentum(*view.segment, steps_) ? &momentum_.of(*view.segment, device) : nullptr;
  const sharding::Segment::Range counted = ParameterNorms::counted(*view.segment);
  const auto refresh = [&](const UpdateView& part, bool counts) {
    for_each_span(part, factor,
                  [&](std::size_t group, const autograd::Parameter& parameter, const optim::SpanUpdate& span,
                      std::int64_t begin) {
                    optim::NormSums unused;
                    refresh_span(momentum, part, span, begin, used_[group], kernels,
                                 counts ? norms_.of(parameter) : unused);
                  });
  };
  // All of the view, of which a part is counted here.
  const auto by_parts = [&](const UpdateView& all) {
    const std::int64_t begin = std::clamp(counted.begin, all.begin, all.end()),
                       end = std::clamp(counted.end, begin, all.end());
    if (all.begin < begin) refresh(all.part(all.begin, begin), false);
    if (begin < end) refresh(all.part(begin, end), true);
    if (end < all.end()) refresh(all.part(end, all.end()), false);
    return true;
  };
  if (beside_gpu)
    on_gpu(device).staging.run(by_parts, false);
  else
    by_parts(view);
}

/// The fresh variance is the third of the view's moments.
void Optimizer::refresh_span(const PackedMomentum* momentum, const UpdateView& view,
                             const optim::SpanUpdate& span, std::int64_t begin, const optim::Hyper& hyper,
                             tensor::Kernels& kernels, optim::NormSums& sums) const {
  float* fresh = view.moments[2].data<float>() + (begin - view.begin);
  const bool first = steps_ == hyper.freeze_step + 1;
  if (!momentum) return optim::refresh_variance(span, nullptr, fresh, first, hyper, kernels, sums);
  for_each_agreed(*momentum, view, span, begin,
                  [&](const optim::SpanUpdate& run, const optim::AgreedMomentum& agreed, std::int64_t at) {
                    optim::refresh_variance(run, &agreed, fresh + at, first, hyper, kernels, sums);
                  });
}

void Optimizer::exchange_momentum(sharding::Segment& segment, tensor::Kernels& kernels) {
  momentum_.of(segment, kernels.device()).exchange(segment, kernels);
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

Scheduler::Scheduler(optim::LrSchedule schedule, std::shared_ptr<Optimizer> optimizer)
    : schedule_(std::move(schedule)),
      optimizer_(std::move(optimizer)),
      proportions_(optimizer_->lr_proportions()) {
  if (!std::all_of(proportions_.begin(), proportions_.end(), [](double x) { return std::isfinite(x); }))
    fail(ErrorKind::config,
         "a parameter group's rate keeps its proportion to optimizer.params.lr under a scheduler, ",
         "and that is 0: give it a rate, or drop the scheduler");
  apply();
}

std::vector<double> Scheduler::get_lr() const {
  std::vector<double> out = proportions_;
  for (double& lr : out) lr *= schedule_.get_lr();
  return out;
}

void Scheduler::step() {
  schedule_.step();
  apply();
}

void Scheduler::restore(const std::string& saved) {
  schedule_.restore(saved);
  apply();
}

void Scheduler::apply() {
  optimizer_->follow(get_lr(), schedule_.current().betas);
}

std::shared_ptr<Scheduler> make_scheduler(const config::Config& config,
                                          const std::shared_ptr<Optimizer>& optimizer) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return nullptr;
  const auto has_betas = [](const config::OptimizerRule& rule) { return config::has_betas(rule.type); };
  const bool betas = has_betas(config.optimizer) ||
                     std::any_of(config.optimizer.groups.begin(), config.optimizer.groups.end(), has_betas);
  return std::make_shared<Scheduler>(optim::LrSchedule(config.scheduler, config.optimizer.lr, betas),
                                     optimizer);
}

}  // namespace sherd::engine
