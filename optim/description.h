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
  parameter_norms,   ///< norms of each logical parameter, between two passes (LAMB)
  whole_parameters,  ///< whole matrices, by lease (Muon)
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

}  // namespace sherd::optim
