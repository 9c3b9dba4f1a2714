#include "optim/rules/adagrad.h"

#include "optim/description.h"

namespace sherd::optim {

bool Adagrad::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::adagrad;
}

Description Adagrad::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type),
          {{"sum", hyper.as<config::AdagradOptions>().initial_accumulator_value}}};
}

Adagrad Adagrad::make(const Hyper& hyper, std::int64_t step, const SpanTerms& terms) {
  const auto& own = hyper.as<config::AdagradOptions>();
  const double rate = hyper.lr / (1 + static_cast<double>(step - 1) * own.lr_decay);
  return {static_cast<float>(own.eps), static_cast<float>(terms.decays ? hyper.weight_decay : 0.0),
          static_cast<float>(rate)};
}

}  // namespace sherd::optim
