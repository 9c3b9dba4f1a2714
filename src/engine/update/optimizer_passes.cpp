#include <algorithm>

#include "base/cpu_isa.h"
#include "engine/update/optimizer_spans.h"

// What Optimizer does beside moving weights: the passes before, and what ranks exchange between them.

namespace sherd::engine {

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
    for_each_tensor_span(
        all.part(begin, end), factor,
        [&](std::size_t group, const MeasuredTensor& tensor, const optim::SpanUpdate& span, auto) {
          if (tensor.is_padding()) return;
          optim::NormSums& sums = norms_.of(tensor);
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
    for_each_span(part, factor, [&](std::size_t group, const optim::SpanUpdate& span, std::int64_t flat) {
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
    for_each_span(part, factor, [&](std::size_t group, const optim::SpanUpdate& span, std::int64_t begin) {
      optim::MomentumSpan packs{span.grad, span.grad_dtype, span.grad_factor, used_[group].betas()->beta1};
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
    for_each_tensor_span(part, factor,
                         [&](std::size_t group, const MeasuredTensor& tensor, const optim::SpanUpdate& span,
                             std::int64_t begin) {
                           optim::NormSums unused;
                           refresh_span(momentum, part, span, begin, used_[group], !norms_.refreshed(tensor),
                                        kernels, counts && !tensor.is_padding() ? norms_.of(tensor) : unused);
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
                             bool first, tensor::Kernels& kernels, optim::NormSums& sums) const {
  float* fresh = view.moments[2].data<float>() + (begin - view.begin);
  if (!momentum) return optim::refresh_variance(span, nullptr, fresh, first, hyper, kernels, sums);
  for_each_agreed(*momentum, view, span, begin,
                  [&](const optim::SpanUpdate& run, const optim::AgreedMomentum& agreed, std::int64_t at) {
                    optim::refresh_variance(run, &agreed, fresh + at, first, hyper, kernels, sums);
                  });
}

void Optimizer::exchange_momentum(sharding::Segment& segment, tensor::Kernels& kernels) {
  momentum_.of(segment, kernels.device()).exchange(segment, kernels);
}

}  // namespace sherd::engine
