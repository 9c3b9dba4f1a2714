#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2), decay decoupled:
/// c = β1·m + (1−β1)·g; p ← p − ((lr·wd)·p + lr·sign(c)); m ← β2·m + (1−β2)·g. (The weight is rounded once:
/// steps of one size in one direction would add up what a second rounding loses.)
///
/// sign(0) is 0, as in the paper: a weight whose gradients have all been zero stays where it is. (DeepSpeed's
/// CPU Lion takes the sign bit of the zero, so +0 moves the weight by −lr, and its CUDA Lion moves it by
/// +lr.) A NaN moves no weight; it is noticed in m.
struct Lion {
  static constexpr int state_count = 1;
  static constexpr int watched = 0;

  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;  ///< lr·wd
  float lr;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& m) const {
    const F c = beta1 * m + one_minus_beta1 * g;
    const F none = {}, step = none + lr;
    p = p - (decay * p + (c > none ? step : c < none ? -step : none));
    m = beta2 * m + one_minus_beta2 * g;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static Lion make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const Lion&, const Lion&) = default;
};

}  // namespace sherd::optim
