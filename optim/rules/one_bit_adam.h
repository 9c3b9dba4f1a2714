#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// 1-bit Adam (Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
/// speed", 2021), without bias correction, as DeepSpeed's. Up to freeze_step: m ← β1·m + (1−β1)·g;
/// v ← β2·v + (1−β2)·(g·g). Behind it v stays, and m ← the momentum that replicas agreed on, which comes in
/// place of g; 0 where v is 0. One replica goes on with m of its own. Then p ← p − lr·(m/(√v + eps) + wd·p).
struct OneBitAdam {
  static constexpr int state_count = 2;
  static constexpr int watched = 1;

  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float eps, step_size;
  float decay;  ///< wd
  bool frozen, agreed;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& m, F& v) const {
    m = agreed ? g : beta1 * m + one_minus_beta1 * g;
    if (frozen)
      m = v > 0.0f ? m : 0.0f * v;
    else
      v = beta2 * v + one_minus_beta2 * (g * g);
    const F denominator = Math::root(v) + eps;
    p = p - step_size * (m / denominator + decay * p);
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static OneBitAdam make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const OneBitAdam&, const OneBitAdam&) = default;
};

}  // namespace sherd::optim
