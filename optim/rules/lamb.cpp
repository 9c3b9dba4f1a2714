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
  out.freeze_step = hyper.as<config::OneBitLambOptions>().freeze_step;
  out.frozen_phases = {Phase::compress, Phase::exchange, Phase::refresh, Phase::elementwise};
  return out;
}

Lamb Lamb::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const auto made = [&](const config::Moments& own, bool corrects, bool frozen) -> Lamb {
    const double t = static_cast<double>(step);
    const double c1 = corrects ? 1 - std::pow(own.beta1, t) : 1.0;
    const double c2 = corrects ? 1 / std::sqrt(1 - std::pow(own.beta2, t)) : 1.0;
    return {f(own.beta1),
            f(1 - own.beta1),
            f(own.beta2),
            f(1 - own.beta2),
            f(1 / c1),
            f(c2),
            f(own.eps),
            f(terms.decays ? hyper.weight_decay : 0.0),
            f(hyper.lr * terms.trust),
            terms.measures,
            frozen};
  };
  if (const auto* lamb = std::get_if<config::LambOptions>(&hyper.options))
    return made(*lamb, lamb->bias_correction, false);
  if (const auto* lamb = std::get_if<config::NvLambOptions>(&hyper.options))
    return made(*lamb, lamb->bias_correction, false);
  const auto& one_bit = hyper.as<config::OneBitLambOptions>();
  return made(one_bit, false, step > one_bit.freeze_step);
}

FrozenLamb FrozenLamb::make(const Hyper& hyper, bool decays) {
  const auto& own = hyper.as<config::OneBitLambOptions>();
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(own.beta1),
          f(1 - own.beta1),
          f(1 / (1 - own.beta1)),
          f(own.beta2),
          f(1 - own.beta2),
          f(own.eps),
          f(decays ? hyper.weight_decay : 0.0)};
}

double Lamb::trust(const Hyper& hyper, double weight, double update, bool) {
  if (weight == 0 || update == 0) return 1;
  const double ratio = weight / update;
  const auto bounded = [&](const auto& own) { return std::clamp(ratio, own.min_coeff, own.max_coeff); };
  if (hyper.type == OptimizerType::nvlamb) return ratio;
  return hyper.type == OptimizerType::lamb ? bounded(hyper.as<config::LambOptions>())
                                           : bounded(hyper.as<config::OneBitLambOptions>());
}

}  // namespace sherd::optim
