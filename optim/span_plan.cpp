#include "optim/isa/span_plan.h"

#include <algorithm>

#include "base/error.h"
#include "optim/description.h"
#include "optim/muon.h"

namespace sherd::optim {
namespace {

// Keeps the rounding bits apart from every other use of the parameter's stream.
constexpr std::uint64_t moment_rounding = 0x6d6f6d656e74ull;

MasterIndex master_index(const SpanUpdate& span) {
  if (span.low) return master_split;
  switch (span.param_dtype) {
    case DType::f32:
      return master_alone;
    case DType::bf16:
      return master_and_bf16;
    case DType::f16:
      return master_and_f16;
    default:
      fail(ErrorKind::usage, "optim::update: the parameter must be fp32, bf16 or fp16, not ",
           name_of(span.param_dtype));
  }
}

MomentIndex moment_index(const SpanUpdate& span) {
  if (span.moment_dtype == DType::f32 || span.moment_dtype == DType::u8) return moment_f32;
  require(span.moment_dtype == DType::bf16, "optim::update: the moments must be fp32, bf16 or uint8, not ",
          name_of(span.moment_dtype));
  return moment_bf16;
}

// The largest bit pattern of a finite fp32 weight that stays finite when rounded to `dtype`.
std::uint32_t largest_weight(DType dtype) {
  if (dtype == DType::bf16) return 0x7f7f7fffu;
  return dtype == DType::f16 ? 0x477fefffu : 0x7f7fffffu;
}
// The same for moments: above the largest bf16, rounding may go to infinity.
std::uint32_t largest_moment(DType dtype) {
  return dtype == DType::bf16 ? 0x7f7f0000u : 0x7f7fffffu;
}

// Calls visit(rule) with the rule of the list that serves `hyper`, as a default-made struct.
template <class Visit, class... R>
void with_rule(const Hyper& hyper, RuleList<R...>, const Visit& visit) {
  const bool found = ((R::serves(hyper) && (visit(R{}), true)) || ...);
  require(found, "optim: no update rule serves the optimizer ", config::name_of(hyper.type));
}

void check_masters(const SpanUpdate& span) {
  if (span.low) {
    require(!span.master, "optim::update: the span has both an fp32 and a split master");
    require(span.param_dtype == DType::bf16, "optim::update: split masters need a bf16 parameter, not ",
            name_of(span.param_dtype));
  } else {
    require(span.master, "optim::update: the span has no master");
  }
  require(span.param_dtype == DType::f32 || span.param, "optim::update: a ", name_of(span.param_dtype),
          " parameter is asked for, and there is no memory for it");
}

void check(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  require(step >= 1, "optim::update: steps count from 1, not ", step);
  require(span.n >= 0 && span.first_element >= 0, "optim::update: ", span.n, " elements from ",
          span.first_element);
  if (span.n == 0) return;
  check_masters(span);
  require(span.grad || span.agreed, "optim::update: the span has no gradient");
  const std::vector<State> states = describe(hyper).states;
  for (std::size_t i = 0;
       i < states.size() && states[i].over_replicas == OverReplicas::same && !states[i].fresh; ++i) {
    require(span.moments[i], "optim::update: the span has no ", states[i].name);
    require(span.moment_dtype != DType::u8 || span.scales[i], "optim::update: the span has no scales of ",
            states[i].name);
  }
  require(span.moment_dtype != DType::u8 || (Adam::serves(hyper) && !span.measures && !span.agreed),
          "optim::update: ", config::name_of(hyper.type), " has no 8-bit states");
}

}  // namespace

GradIndex grad_index(DType dtype) {
  if (dtype == DType::f32) return grad_f32;
  require(dtype == DType::bf16 || dtype == DType::f16,
          "optim::update: the gradient must be fp32, bf16 or fp16, not ", name_of(dtype));
  return dtype == DType::bf16 ? grad_bf16 : grad_f16;
}

Description describe(const Hyper& hyper) {
  Description out;
  with_rule(hyper, Rules{}, [&]<class Rule>(const Rule&) { out = Rule::describe(hyper); });
  return out;
}

namespace {
bool contains(const std::vector<Phase>& phases, Phase wanted) {
  return std::find(phases.begin(), phases.end(), wanted) != phases.end();
}
}  // namespace

bool measures(const Description& rule) {
  return contains(rule.phases, Phase::parameter_norms);
}

bool refreshes(const Description& rule) {
  return contains(rule.frozen_phases, Phase::refresh);
}

bool takes_matrices(const Description& rule) {
  return contains(rule.phases, Phase::whole_parameters);
}

bool has_codes(const Description& rule) {
  return std::any_of(rule.states.begin(), rule.states.end(),
                     [](const State& state) { return state.code != Code::none; });
}

std::optional<Hyper> beside(const Hyper& hyper) {
  if (hyper.type == config::OptimizerType::muon) return beside_muon(hyper);
  if (hyper.type != config::OptimizerType::adamw8bit) return std::nullopt;
  Hyper out = hyper;
  out.type = config::OptimizerType::adamw;
  return out;
}

double trust_ratio(const Hyper& hyper, double weight, double measured, bool matrix) {
  double out = 1;
  with_rule(hyper, Rules{}, [&]<class Rule>(const Rule&) {
    if constexpr (requires { Rule::trust(hyper, weight, measured, matrix); })
      out = Rule::trust(hyper, weight, measured, matrix);
  });
  return out;
}

SpanPlan plan_span(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  check(span, hyper, step);
  SpanPlan plan;
  if (span.n == 0) return plan;
  plan.grad = grad_index(span.grad_dtype), plan.master = master_index(span), plan.moment = moment_index(span);
  with_rule(hyper, Rules{}, [&]<class Rule>(const Rule&) {
    plan.rule = Rule::make(hyper, step, {span.decay, span.trust, span.measures, span.agreed});
  });
  plan.factor = static_cast<float>(span.grad_factor);
  plan.largest_weight = largest_weight(span.param_dtype);
  plan.largest_moment = largest_moment(span.moment_dtype);
  plan.noise = span.rounding.at(moment_rounding).at(static_cast<std::uint64_t>(step));
  return plan;
}

}  // namespace sherd::optim
