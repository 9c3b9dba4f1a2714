#include "engine/update/rule_update.h"

#include <map>
#include <utility>

#include "base/error.h"
#include "engine/update/rules/rule_updates.h"

namespace sherd::engine {

using optim::Hyper;
using optim::SpanUpdate;
using sharding::Piece;

std::size_t UpdateContext::group(const autograd::Parameter& parameter) const {
  const auto found = group_of.find(&parameter);
  return found == group_of.end() ? 0 : static_cast<std::size_t>(found->second);
}

bool RuleUpdate::pass(optim::Phase, const UpdateView& view, double factor, tensor::Kernels& kernels) {
  return move_weights(view, factor, kernels);
}

void RuleUpdate::exchange(optim::Phase, sharding::Segment& segment, tensor::Kernels&) {
  fail(ErrorKind::usage, "the rule of unit '", segment.name(), "' exchanges nothing");
}

bool RuleUpdate::move_weights(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const auto work = [&](const UpdateView& part, optim::FiniteCheck& check) {
    std::map<const Hyper*, std::vector<SpanUpdate>> spans;  // a kernel takes spans of one Hyper
    for_each_span(part, factor,
                  [&](const Hyper& hyper, SpanUpdate& span, auto) { spans[&hyper].push_back(span); });
    for (const auto& [hyper, together] : spans) optim::update(together, *hyper, context_.step, device, check);
  };
  return context_.passes.run(view, device, {.work = work, .moves_weights = true});
}

void RuleUpdate::for_each_span(const UpdateView& view, double factor, const SpanVisit& visit) const {
  for (const Piece& piece : view.segment->layout().pieces(view.begin, view.end()))
    for_each_run(view, piece, factor, visit);
}

void RuleUpdate::for_each_run(const UpdateView& view, const Piece& piece, double factor,
                              const SpanVisit& visit) const {
  const autograd::Parameter& parameter = *view.segment->layout().parameters()[piece.slot];
  const Hyper& hyper = context_.hyper[context_.group(parameter)];
  const auto run = [&](const Piece& part, std::int64_t first_element) {
    SpanUpdate span = span_of(view, part, factor_of(*view.segment, hyper, factor));
    span.first_element = first_element;
    visit(hyper, span, part.flat_begin);
  };
  const tensor::Slice slice = parameter.logical_slice();
  if (slice.is_whole() || view.moments.empty() || view.moments[0].dtype() != DType::bf16)
    return run(piece, piece.parameter_begin);
  slice.for_each_run(piece.parameter_begin, piece.parameter_begin + piece.count,
                     [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                       const std::int64_t flat = piece.flat_begin + local - piece.parameter_begin;
                       run({piece.slot, local, flat, count}, logical);
                     });
}

SpanUpdate RuleUpdate::span_of(const UpdateView& view, const Piece& piece, double factor) const {
  const UpdateView part = view.part(piece.flat_begin, piece.flat_begin + piece.count);
  const sharding::MasterForm form = view.segment->master_form();
  const autograd::Parameter& parameter = *view.segment->layout().parameters()[piece.slot];
  SpanUpdate span;
  if (form == sharding::MasterForm::in_parameters) {
    span.master = part.parameters.data<float>();
  } else {
    span.param = part.parameters.raw(), span.param_dtype = part.parameters.dtype();
    if (form == sharding::MasterForm::split)
      span.low = part.masters.data<std::uint16_t>();
    else
      span.master = part.masters.data<float>();
  }
  span.grad = part.gradients.raw(), span.grad_dtype = part.gradients.dtype();
  for (std::size_t i = 0; i < part.moments.size() && i < std::size(span.moments); ++i) {
    span.moments[i] = part.moments[i].raw(), span.moment_dtype = part.moments[i].dtype();
    if (i < part.scales.size() && part.scales[i].defined()) span.scales[i] = part.scales[i].data<float>();
  }
  span.rounding = {context_.seed, stable_hash(parameter.name)};
  span.n = piece.count;
  span.grad_factor = factor;
  span.decay = parameter.decay;
  return span;
}

std::unique_ptr<RuleUpdate> make_rule_update(const optim::Description& rule, UpdateContext& context,
                                             const SharedByRules& shared) {
  if (optim::takes_matrices(rule)) return make_matrix_update(rule, context, shared.matrices);
  if (optim::refreshes(rule)) return make_one_bit_lamb_update(rule, context, shared.norms);
  if (rule.freeze_step) return make_one_bit_update(rule, context);
  if (optim::measures(rule)) return std::make_unique<TrustUpdate>(rule, context, shared.norms);
  return std::make_unique<RuleUpdate>(rule, context);
}

}  // namespace sherd::engine
