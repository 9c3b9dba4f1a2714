#include "optim/rules/lamb.h"

#include <algorithm>
#include <cmath>

#include "optim/description.h"

namespace sherd::optim {

using config::OptimizerType;

bool Lamb::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::lamb || hyper.type == OptimizerType::nvlamb ||
         hyper.type == OptimizerType::onebitlamb;
}

Description Lamb::describe(const Hyper& hyper) {
  Description out{.type = config::name_of(hyper.type),
                  .states = {{"exp_avg"}, {"exp_avg_sq"}},
                  .phases = {Phase::parameter_norms, Phase::elementwise}};
  if (hyper.type != OptimizerType::onebitlamb) return out;
  out.states.push_back({.name = "exp_avg_sq_fresh", .fresh = true});
  out.states.push_back({"worker_error", 0, OverReplicas::own});
  out.states.push_back({"server_error", 0, OverReplicas::spread});
  out.freeze_step = hyper.freeze_step;
  out.frozen_phases = {Phase::compress, Phase::exchange, Phase::refresh, Phase::elementwise};
  return out;
}

Lamb Lamb::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const double t = static_cast<double>(step);
  const bool one_bit = hyper.type == OptimizerType::onebitlamb, corrects = hyper.bias_correction && !one_bit;
  const double c1 = corrects ? 1 - std::pow(hyper.beta1, t) : 1.0;
  const double c2 = corrects ? 1 / std::sqrt(1 - std::pow(hyper.beta2, t)) : 1.0;
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
          terms.measures,
          one_bit && step > hyper.freeze_step};
}

FrozenLamb FrozenLamb::make(const Hyper& hyper, bool decays) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(hyper.beta1),
          f(1 - hyper.beta1),
          f(1 / (1 - hyper.beta1)),
          f(hyper.beta2),
          f(1 - hyper.beta2),
          f(hyper.eps),
          f(decays ? hyper.weight_decay : 0.0)};
}

double Lamb::trust(const Hyper& hyper, double weight, double update, bool) {
  if (weight == 0 || update == 0) return 1;
  const double ratio = weight / update;
  return hyper.type == OptimizerType::nvlamb ? ratio : std::clamp(ratio, hyper.min_coeff, hyper.max_coeff);
}

}  // namespace sherd::optim
