#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// Adagrad (Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
/// optimization", 2011) as torch.optim.Adagrad has it: g ← g + wd·p; s ← s + g·g; p ← p − r·(g/(√s + eps)),
/// r = lr/(1 + (t−1)·lr_decay). The sums start at initial_accumulator_value.
struct Adagrad {
  static constexpr int state_count = 1;
  static constexpr int watched = 0;

  float eps, decay;
  float rate;  ///< r

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& sum) const {
    g = g + decay * p;
    sum = sum + g * g;
    p = p - rate * (g / (Math::root(sum) + eps));
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static Adagrad make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const Adagrad&, const Adagrad&) = default;
};

}  // namespace sherd::optim
