#include "optim/rules/lamb.h"

#include <algorithm>
#include <cmath>

#include "optim/description.h"

namespace sherd::optim {

using config::OptimizerType;

bool Lamb::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::lamb || hyper.type == OptimizerType::nvlamb;
}

Description Lamb::describe(const Hyper& hyper) {
  return {.type = config::name_of(hyper.type),
          .states = {{"exp_avg"}, {"exp_avg_sq"}},
          .phases = {Phase::parameter_norms, Phase::elementwise}};
}

Lamb Lamb::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const double t = static_cast<double>(step);
  const double c1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, t) : 1.0;
  const double c2 = hyper.bias_correction ? 1 / std::sqrt(1 - std::pow(hyper.beta2, t)) : 1.0;
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(hyper.beta1),
          f(1 - hyper.beta1),
          f(hyper.beta2),
          f(1 - hyper.beta2),
          f(1 / c1),
          f(c2),
          f(hyper.eps),
          f(terms.decays ? hyper.weight_decay : 0.0),
          f(hyper.lr * terms.trust),
          terms.measures};
}

double Lamb::trust(const Hyper& hyper, double weight, double update, bool) {
  if (weight == 0 || update == 0) return 1;
  const double ratio = weight / update;
  return hyper.type == OptimizerType::lamb ? std::clamp(ratio, hyper.min_coeff, hyper.max_coeff) : ratio;
}

}  // namespace sherd::optim
