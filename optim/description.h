#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "optim/quantized.h"
#include "optim/update_rule.h"

namespace sherd::optim {

/// How replicas hold a state.
enum class OverReplicas : std::uint8_t {
  same,   ///< all have the same values
  own,    ///< each has values of its own
  spread  ///< each element has one replica that holds it, as many for each
};

/// A tensor that a rule keeps per element beside the masters, in the dtype of the configuration's moments, or
/// in codes.
struct State {
  std::string name;    ///< as in checkpoints: "exp_avg"
  double initial = 0;  ///< every element's value before the first step
  OverReplicas over_replicas = OverReplicas::same;
  Code code = Code::none;  ///< initial values are 0 where there is one
  bool fresh = false;      ///< Phase::refresh alone takes it
  bool operator==(const State&) const = default;
};

/// The phases of an update, in order.
enum class Phase : std::uint8_t {
  elementwise,       ///< one pass over the elements, see SpanUpdate
  parameter_norms,   ///< norms of each logical parameter, from a pass that changes nothing (LAMB, LARS)
  direction,         ///< one pass that updates states and makes what whole_parameters takes (Muon)
  whole_parameters,  ///< whole matrices, dealt out over the ranks that share them (Muon)
  compress,          ///< one pass over momentum that replicas are to exchange (1-bit Adam)
  exchange,          ///< replicas agree on that momentum
  refresh            ///< one pass that takes it, refreshes a state and measures (1-bit LAMB)
};

/// All that the engine must know of an optimizer to keep its states and run its update.
struct Description {
  std::string type;           ///< as in the configuration: "AdamW"
  std::vector<State> states;  ///< the ones held by all are SpanUpdate::moments, and come first
  std::vector<Phase> phases = {Phase::elementwise};
  /// After so many steps replicas no longer agree on gradients: each takes its own, and they exchange
  /// compressed momentum (1-bit Adam). None: never.
  std::optional<std::int64_t> freeze_step{};
  /// The phases of an update then. The first two are left out where there is one replica.
  std::vector<Phase> frozen_phases{};
  bool operator==(const Description&) const = default;

  /// Whether it is so in step number `step`, which counts from 1.
  bool exchanges_momentum(std::int64_t step) const { return freeze_step && step > *freeze_step; }
};

/// Describes the rule that `hyper` names: Adam keeps "exp_avg" and "exp_avg_sq", SGD with momentum
/// "momentum_buffer", plain SGD nothing.
Description describe(const Hyper& hyper);

/// Whether the rule measures parameters before it updates them (Phase::parameter_norms).
bool measures(const Description& rule);

/// Whether the rule measures while it takes momentum, behind its freeze_step (Phase::refresh).
bool refreshes(const Description& rule);

/// Whether it takes whole matrices (Phase::whole_parameters).
bool takes_matrices(const Description& rule);

/// Whether it keeps states in blocks that share a scale.
bool has_codes(const Description& rule);

/// The rule of parameters that a rule does not update itself: AdamW beside Muon and 8-bit AdamW. None: it
/// updates all.
std::optional<Hyper> beside(const Hyper& hyper);

/// The factor of a logical parameter's step, from the norms that measure() finds (0 and more): of the weight,
/// and of what the rule measures. `matrix`: it has two dimensions or more. 1 for rules that do not measure.
double trust_ratio(const Hyper& hyper, double weight, double measured, bool matrix);

}  // namespace sherd::optim
