#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// Stochastic gradient descent without momentum: g ← g + wd·p; p ← p − lr·g.
struct PlainSgd {
  static constexpr int state_count = 0;
  static constexpr int watched = 0;

  float decay, lr;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g) const {
    g = g + decay * p;
    p = p - lr * g;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static PlainSgd make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const PlainSgd&, const PlainSgd&) = default;
};

/// With momentum, as PyTorch has it with dampening 0: g ← g + wd·p; b ← µ·b + g; g ← b, or g + µ·b with
/// Nesterov's; p ← p − lr·g.
struct MomentumSgd {
  static constexpr int state_count = 1;
  static constexpr int watched = 0;

  float momentum, decay, lr;
  bool nesterov;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& b) const {
    g = g + decay * p;
    b = momentum * b + g;
    g = nesterov ? g + momentum * b : b;
    p = p - lr * g;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static MomentumSgd make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const MomentumSgd&, const MomentumSgd&) = default;
};

}  // namespace sherd::optim
