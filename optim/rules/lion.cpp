#include "optim/rules/lion.h"

#include "optim/description.h"

namespace sherd::optim {

bool Lion::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::lion;
}

Description Lion::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {{"exp_avg"}}};
}

Lion Lion::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  const auto& own = hyper.as<config::LionOptions>();
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(own.beta1),
          f(1 - own.beta1),
          f(own.beta2),
          f(1 - own.beta2),
          f(terms.decays ? hyper.lr * hyper.weight_decay : 0.0),
          f(hyper.lr)};
}

}  // namespace sherd::optim
