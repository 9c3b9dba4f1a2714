#include "optim/rules/lars.h"

#include <algorithm>

#include "optim/description.h"

namespace sherd::optim {

bool Lars::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::lars;
}

Description Lars::describe(const Hyper& hyper) {
  return {.type = config::name_of(hyper.type),
          .states = {{"momentum_buffer"}},
          .phases = {Phase::parameter_norms, Phase::elementwise}};
}

Lars Lars::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(hyper.as<config::LarsOptions>().momentum), f(terms.decays ? hyper.weight_decay : 0.0),
          f(hyper.lr * terms.trust), terms.measures};
}

double Lars::trust(const Hyper& hyper, double weight, double gradient, bool matrix) {
  if (!matrix || weight == 0 || gradient == 0) return 1;
  const auto& own = hyper.as<config::LarsOptions>();
  const double ratio = own.trust_coefficient * weight / (gradient + hyper.weight_decay * weight + own.eps);
  return !own.clip ? ratio : hyper.lr > 0 ? std::min(ratio / hyper.lr, 1.0) : 1.0;
}

}  // namespace sherd::optim
