#include "engine/update/rules/rule_updates.h"

#include <algorithm>

namespace sherd::engine {

using optim::Hyper;
using optim::SpanUpdate;
using sharding::Piece;

bool TrustUpdate::pass(optim::Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) {
  if (phase == optim::Phase::parameter_norms) return measure(view, factor, kernels);
  return RuleUpdate::pass(phase, view, factor, kernels);
}

bool TrustUpdate::measure(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const auto work = [&](const UpdateView& all, optim::FiniteCheck&) {
    const sharding::Segment::Range counted = ParameterNorms::counted(*all.segment);
    const std::int64_t begin = std::max(counted.begin, all.begin), end = std::min(counted.end, all.end());
    if (begin >= end) return;
    for_each_tensor_span(all.part(begin, end), factor,
                         [&](const MeasuredTensor& tensor, const Hyper& hyper, const SpanUpdate& span, auto) {
                           if (!tensor.is_padding())
                             optim::measure(span, hyper, context().step, kernels, norms_->of(tensor));
                         });
  };
  const auto charge = [&] {
    std::int64_t most = 0;
    for (const Piece& piece : view.segment->layout().pieces(view.begin, view.end()))
      most = std::max(most, piece.count);
    if (most > 0) optim::charge_measure(device, most, view.moments.front().dtype(), view.moments.size());
  };
  return context().passes.run(view, device, {.work = work, .charge_on_gpu = charge});
}

void TrustUpdate::for_each_tensor_span(const UpdateView& view, double factor,
                                       const TensorVisit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  constexpr std::int64_t block = sharding::layout_alignment;
  for (const Piece& piece : layout.pieces(view.begin, view.end())) {
    const std::int64_t first = piece.parameter_begin;
    const auto each = [&](std::int64_t begin, std::int64_t end, const MeasuredTensor& tensor) {
      const Piece part{piece.slot, begin, piece.flat_begin + begin - first, end - begin};
      for_each_run(view, part, factor, [&](const Hyper& hyper, SpanUpdate& span, std::int64_t flat) {
        span.trust = norms_->trust(tensor);
        const std::int64_t head = std::min(span.n, (block - flat % block) % block);
        if (head > 0) visit(tensor, hyper, optim::part_of(span, 0, head), flat);
        if (head < span.n) visit(tensor, hyper, optim::part_of(span, head, span.n - head), flat + head);
      });
    };
    for_each_measured(*layout.parameters()[piece.slot], first, first + piece.count, each);
  }
}

void TrustUpdate::for_each_span(const UpdateView& view, double factor, const SpanVisit& visit) const {
  for_each_tensor_span(view, factor,
                       [&](const MeasuredTensor&, const Hyper& hyper, SpanUpdate span, std::int64_t begin) {
                         visit(hyper, span, begin);
                       });
}

/// NVLAMB first divides all gradients by their norm.
double TrustUpdate::factor_of(const sharding::Segment&, const Hyper& hyper, double factor) const {
  const bool normalizes = hyper.type == config::OptimizerType::nvlamb &&
                          context().norm > hyper.as<config::NvLambOptions>().normalize_above;
  return normalizes ? factor / context().norm : factor;
}

}  // namespace sherd::engine
