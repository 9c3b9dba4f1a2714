// The parts of the rules that run on the host: which optimizers they serve, what they keep, and their
// numbers.

#include <algorithm>
#include <cmath>

#include "optim/description.h"
#include "optim/rules/list.h"

namespace sherd::optim {

using config::OptimizerType;

namespace {

float f(double x) {
  return static_cast<float>(x);
}

float decay_of(const Hyper& hyper, bool decays) {
  return f(decays ? hyper.weight_decay : 0.0);
}

}  // namespace

bool PlainSgd::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::sgd && !hyper.keeps_states();
}

Description PlainSgd::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {}};
}

PlainSgd PlainSgd::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  return {decay_of(hyper, terms.decays), f(hyper.lr)};
}

bool MomentumSgd::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::sgd && hyper.keeps_states();
}

Description MomentumSgd::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {{"momentum_buffer"}}};
}

MomentumSgd MomentumSgd::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  const auto& own = hyper.as<config::SgdOptions>();
  return {f(own.momentum), decay_of(hyper, terms.decays), f(hyper.lr), own.nesterov};
}

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
  return {f(own.beta1), f(1 - own.beta1), f(own.beta2),     f(1 - own.beta2),        f(c2),
          f(own.eps),   f(decay),         f(hyper.lr / c1), !hyper.decoupled_decay()};
}

bool Lion::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::lion;
}

Description Lion::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {{"exp_avg"}}};
}

Lion Lion::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  const auto& own = hyper.as<config::LionOptions>();
  return {f(own.beta1),
          f(1 - own.beta1),
          f(own.beta2),
          f(1 - own.beta2),
          f(terms.decays ? hyper.lr * hyper.weight_decay : 0.0),
          f(hyper.lr)};
}

bool Adagrad::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::adagrad;
}

Description Adagrad::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type),
          {{"sum", hyper.as<config::AdagradOptions>().initial_accumulator_value}}};
}

Adagrad Adagrad::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const auto& own = hyper.as<config::AdagradOptions>();
  const double rate = hyper.lr / (1 + static_cast<double>(step - 1) * own.lr_decay);
  return {f(own.eps), decay_of(hyper, terms.decays), f(rate)};
}

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
            decay_of(hyper, terms.decays),
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
  return {f(own.beta1),     f(1 - own.beta1), f(1 / (1 - own.beta1)), f(own.beta2),
          f(1 - own.beta2), f(own.eps),       decay_of(hyper, decays)};
}

double Lamb::trust(const Hyper& hyper, double weight, double update, bool) {
  if (weight == 0 || update == 0) return 1;
  const double ratio = weight / update;
  const auto bounded = [&](const auto& own) { return std::clamp(ratio, own.min_coeff, own.max_coeff); };
  if (hyper.type == OptimizerType::nvlamb) return ratio;
  return hyper.type == OptimizerType::lamb ? bounded(hyper.as<config::LambOptions>())
                                           : bounded(hyper.as<config::OneBitLambOptions>());
}

bool Lars::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::lars;
}

Description Lars::describe(const Hyper& hyper) {
  return {.type = config::name_of(hyper.type),
          .states = {{"momentum_buffer"}},
          .phases = {Phase::parameter_norms, Phase::elementwise}};
}

Lars Lars::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  return {f(hyper.as<config::LarsOptions>().momentum), decay_of(hyper, terms.decays),
          f(hyper.lr * terms.trust), terms.measures};
}

double Lars::trust(const Hyper& hyper, double weight, double gradient, bool matrix) {
  if (!matrix || weight == 0 || gradient == 0) return 1;
  const auto& own = hyper.as<config::LarsOptions>();
  const double ratio = own.trust_coefficient * weight / (gradient + hyper.weight_decay * weight + own.eps);
  return !own.clip ? ratio : hyper.lr > 0 ? std::min(ratio / hyper.lr, 1.0) : 1.0;
}

bool OneBitAdam::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::onebitadam;
}

Description OneBitAdam::describe(const Hyper& hyper) {
  Description out{config::name_of(hyper.type),
                  {{"exp_avg"},
                   {"exp_avg_sq"},
                   {"worker_error", 0, OverReplicas::own},
                   {"server_error", 0, OverReplicas::spread}}};
  out.freeze_step = hyper.as<config::OneBitAdamOptions>().freeze_step;
  out.frozen_phases = {Phase::compress, Phase::exchange, Phase::elementwise};
  return out;
}

OneBitAdam OneBitAdam::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const auto& own = hyper.as<config::OneBitAdamOptions>();
  return {f(own.beta1),
          f(1 - own.beta1),
          f(own.beta2),
          f(1 - own.beta2),
          f(own.eps),
          f(hyper.lr),
          decay_of(hyper, terms.decays),
          step > own.freeze_step,
          terms.agreed};
}

bool MuonDirection::serves(const Hyper& hyper) {
  return hyper.type == OptimizerType::muon;
}

Description MuonDirection::describe(const Hyper& hyper) {
  return {.type = config::name_of(hyper.type),
          .states = {{"momentum_buffer"}},
          .phases = {Phase::direction, Phase::whole_parameters, Phase::elementwise}};
}

MuonDirection MuonDirection::make(const Hyper& hyper, std::int64_t, const SpanTerms&) {
  const auto& own = hyper.as<config::MuonOptions>();
  return {f(own.momentum), f(1 - own.momentum), 0, own.nesterov};
}

}  // namespace sherd::optim
