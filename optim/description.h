#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "optim/update_rule.h"

namespace sherd::optim {

/// A tensor that a rule keeps per element beside the masters, in the dtype of the configuration's moments.
struct State {
  std::string name;    ///< as in checkpoints: "exp_avg"
  double initial = 0;  ///< of every element before the first step
  bool operator==(const State&) const = default;
};

/// The gradient that a rule takes.
enum class Gradient : std::uint8_t {
  reduced,  ///< the mean over all data-parallel ranks
  local     ///< this replica's own
};

/// What an update does, in order.
enum class Phase : std::uint8_t {
  elementwise,       ///< one pass over the elements, see SpanUpdate
  parameter_norms,   ///< norms of each logical parameter, from a pass that changes nothing (LAMB, LARS)
  direction,         ///< one pass that updates states and makes what whole_parameters takes (Muon)
  whole_parameters,  ///< whole matrices, dealt out over the ranks that share them (Muon)
  exchange           ///< an exchange between replicas (1-bit Adam)
};

/// What the engine must know of an optimizer to keep its states and run its update.
struct Description {
  std::string type;           ///< as in the configuration: "AdamW"
  std::vector<State> states;  ///< in the order of SpanUpdate::moments
  Gradient gradient = Gradient::reduced;
  std::vector<Phase> phases = {Phase::elementwise};
  bool operator==(const Description&) const = default;
};

/// Of the rule that `hyper` names: Adam keeps "exp_avg" and "exp_avg_sq", SGD with momentum
/// "momentum_buffer", plain SGD nothing.
Description describe(const Hyper& hyper);

/// Whether it measures parameters before it updates them (Phase::parameter_norms).
bool measures(const Description& rule);

/// Whether it takes whole matrices (Phase::whole_parameters).
bool takes_matrices(const Description& rule);

/// By what the step of a logical parameter is multiplied, from the norms that measure() finds (0 and more):
/// of the weight, and of what the rule measures. `matrix`: it has two dimensions or more. 1 for rules that do
/// not measure.
double trust_ratio(const Hyper& hyper, double weight, double measured, bool matrix);

}  // namespace sherd::optim
