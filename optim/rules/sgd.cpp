#include "optim/rules/sgd.h"

#include "optim/description.h"

namespace sherd::optim {
namespace {

float decay_of(const Hyper& hyper, bool decays) {
  return static_cast<float>(decays ? hyper.weight_decay : 0.0);
}

}  // namespace

bool PlainSgd::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::sgd && !hyper.keeps_states();
}

Description PlainSgd::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {}};
}

PlainSgd PlainSgd::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  return {decay_of(hyper, terms.decays), static_cast<float>(hyper.lr)};
}

bool MomentumSgd::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::sgd && hyper.keeps_states();
}

Description MomentumSgd::describe(const Hyper& hyper) {
  return {config::name_of(hyper.type), {{"momentum_buffer"}}};
}

MomentumSgd MomentumSgd::make(const Hyper& hyper, std::int64_t, const SpanTerms& terms) {
  const auto& own = hyper.as<config::SgdOptions>();
  return {static_cast<float>(own.momentum), decay_of(hyper, terms.decays), static_cast<float>(hyper.lr),
          own.nesterov};
}

}  // namespace sherd::optim
