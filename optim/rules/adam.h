#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// Adam and AdamW (Kingma and Ba, "Adam: a method for stochastic optimization", 2015; Loshchilov and Hutter,
/// "Decoupled weight decay regularization", 2019). L2: g ← g + wd·p. m ← β1·m + (1−β1)·g;
/// v ← β2·v + (1−β2)·(g·g); decoupled: p ← p − (lr·wd)·p; p ← p − (lr/c1)·(m/(√v·c2 + eps)), c1 = 1−β1ᵗ,
/// c2 = 1/√(1−β2ᵗ), both 1 without bias correction.
struct Adam {
  static constexpr int state_count = 2;
  // Where the mean of squares does not overflow, no gradient is above 2^64, and their mean is far from it.
  static constexpr int watched = 1;

  float beta1, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps;
  float decay;      ///< lr·wd decoupled, or wd for L2
  float step_size;  ///< lr/c1
  bool l2;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& m, F& v) const {
    if (l2) g = g + decay * p;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
    const F denominator = Math::root(v) * root_scale + eps;
    if (!l2) p = p - decay * p;
    p = p - step_size * (m / denominator);
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static Adam make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const Adam&, const Adam&) = default;
};

}  // namespace sherd::optim
