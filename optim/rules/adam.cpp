#include "optim/rules/adam.h"

#include <cmath>

#include "optim/description.h"

namespace sherd::optim {

using config::OptimizerType;

bool Adam::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::adam || hyper.type == OptimizerType::adamw ||
         hyper.type == OptimizerType::adamw8bit;
}

Description Adam::describe(const Hyper& hyper) {
  Description out{config::name_of(hyper.type), {{"exp_avg"}, {"exp_avg_sq"}}};
  if (hyper.type == OptimizerType::adamw8bit)
    out.states[0].code = Code::signed_8bit, out.states[1].code = Code::unsigned_8bit;
  return out;
}

Adam Adam::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const auto& own = hyper.as<config::AdamOptions>();
  const double t = static_cast<double>(step);
  const double c1 = own.bias_correction ? 1 - std::pow(own.beta1, t) : 1.0;
  const double c2 = own.bias_correction ? 1 / std::sqrt(1 - std::pow(own.beta2, t)) : 1.0;
  const double decay = terms.decays ? hyper.weight_decay * (hyper.decoupled_decay() ? hyper.lr : 1.0) : 0.0;
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(own.beta1), f(1 - own.beta1), f(own.beta2),     f(1 - own.beta2),        f(c2),
          f(own.eps),   f(decay),         f(hyper.lr / c1), !hyper.decoupled_decay()};
}

}  // namespace sherd::optim
