#include "optim/rules/one_bit_adam.h"

#include "optim/description.h"

namespace sherd::optim {

bool OneBitAdam::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::onebitadam;
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
  const auto f = [](double x) { return static_cast<float>(x); };
  const double decay = terms.decays ? hyper.weight_decay : 0.0;
  return {f(own.beta1), f(1 - own.beta1), f(own.beta2),           f(1 - own.beta2), f(own.eps),
          f(hyper.lr),  f(decay),         step > own.freeze_step, terms.agreed};
}

}  // namespace sherd::optim
