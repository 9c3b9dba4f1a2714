#include "optim/rules/muon.h"

#include "optim/description.h"

namespace sherd::optim {

bool MuonDirection::serves(const Hyper& hyper) {
  return hyper.type == config::OptimizerType::muon;
}

Description MuonDirection::describe(const Hyper& hyper) {
  return {.type = config::name_of(hyper.type),
          .states = {{"momentum_buffer"}},
          .phases = {Phase::direction, Phase::whole_parameters, Phase::elementwise}};
}

MuonDirection MuonDirection::make(const Hyper& hyper, std::int64_t, const SpanTerms&) {
  const auto& own = hyper.as<config::MuonOptions>();
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(own.momentum), f(1 - own.momentum), 0, own.nesterov};
}

}  // namespace sherd::optim
