#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017), and with `clip`
/// LARC as apex has it: b ← µ·b + s·(g + wd·p); p ← p − b. s: lr·r, r: trust(). Vectors (biases, norms) take
/// lr itself.
struct Lars {
  static constexpr int state_count = 1;
  static constexpr int watched = 0;

  float momentum;
  float decay;      ///< wd
  float step_size;  ///< s
  bool measures;    ///< the gradient takes the place of the weight

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& b) const {
    b = momentum * b + step_size * (g + decay * p);
    if (measures)
      p = g;
    else
      p = p - b;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static Lars make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  /// For a matrix η·‖p‖/(‖g‖ + wd·‖p‖ + eps), with `clip` that divided by lr and at most 1, so that s is the
  /// smaller of it and lr; 1 where one of the norms is 0, and for a vector.
  static double trust(const config::OptimizerRule& hyper, double weight, double gradient, bool matrix);
  friend bool operator==(const Lars&, const Lars&) = default;
};

}  // namespace sherd::optim
