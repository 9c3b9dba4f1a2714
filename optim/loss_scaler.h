#pragma once

#include <cstdint>
#include <string>

#include "config/optimizer.h"

namespace sherd::optim {

/// The loss scale of fp16 training (Micikevicius et al., "Mixed precision training", 2018), with the states
/// and transitions of DeepSpeed 0.19. A static scale never changes.
///
/// In one optimizer step: read scale(), multiply the loss by it, look for overflow, call update(overflow),
/// and unscale the gradients by the scale *read before*. (DeepSpeed unscales by the updated one, which halves
/// the gradients of a step on which the scale grows; Sherd does not.)
///
/// A plain value; not synchronised. Every rank keeps its own, and all make the same transitions since
/// `overflow` is agreed.
class LossScaler {
 public:
  explicit LossScaler(const config::LossScaling& settings);

  double scale() const { return state_.scale; }

  /// Ends an optimizer step. On overflow the step must be skipped by the caller; the scale halves once the
  /// hysteresis is used up. After `loss_scale_window` + 1 clean steps it doubles. Throws Error{numerics} on
  /// an overflow with the scale already at its minimum; the state is unchanged then.
  void update(bool overflow);

  struct State {
    double scale = 1;
    std::int64_t iteration = 0;       ///< updates so far
    std::int64_t last_overflow = -1;  ///< the iteration of the last overflow, −1 before any
    int hysteresis = 1;               ///< overflows left before the scale halves, ≥ 1
    bool operator==(const State&) const = default;
  };
  const State& state() const { return state_; }

  /// The state as one line of text that restore() reads to the bit. Throws Error{data} for other text.
  std::string save() const;
  void restore(const std::string& saved);

 private:
  void on_overflow();
  void on_clean_step();

  config::LossScaling settings_;
  State state_;
};

}  // namespace sherd::optim
