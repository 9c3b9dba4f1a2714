#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
/// algorithm 2), and NVLAMB (Sreenivas et al., "Pretraining BERT with layer-wise adaptive learning rates",
/// 2019), which takes gradients divided by their global norm. m ← β1·m + (1−β1)·g; v ← β2·v + (1−β2)·(g·g);
/// u = (m/c1)/(√v·c2 + eps) + wd·p; p ← p − (lr·r)·u, c1 = 1−β1ᵗ, c2 = 1/√(1−β2ᵗ), both 1 without bias
/// correction; r: trust(). OneBitLamb is LAMB without bias correction up to its freeze_step; behind it m and
/// v are those that FrozenLamb has left, and r comes from what that measures.
struct Lamb {
  static constexpr int state_count = 2;
  static constexpr int watched = 1;  // as Adam's

  float beta1, one_minus_beta1, beta2, one_minus_beta2, mean_scale, root_scale, eps;
  float decay;      ///< wd
  float step_size;  ///< lr·r
  bool measures;    ///< u itself takes the place of the weight
  bool frozen;      ///< m and v stay

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& m, F& v) const {
    if (!frozen) {
      m = beta1 * m + one_minus_beta1 * g;
      v = beta2 * v + one_minus_beta2 * (g * g);
    }
    const F u = (mean_scale * m) / (Math::root(v) * root_scale + eps) + decay * p;
    if (measures)
      p = u;
    else
      p = p - step_size * u;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static Lamb make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  /// ‖p‖/‖u‖, for LAMB within [min_coeff, max_coeff]; 1 where one of them is 0.
  static double trust(const config::OptimizerRule& hyper, double weight, double update, bool matrix);
  friend bool operator==(const Lamb&, const Lamb&) = default;
};

/// 1-bit LAMB's pass behind its freeze_step, before the update (Li et al., "1-bit LAMB: communication
/// efficient large-scale large-batch training with LAMB's convergence speed", 2022, algorithm 1), as
/// DeepSpeed: m ← the new momentum, 0 where v is 0; ĝ = (m − β1·m_before)/(1−β1); w ← β2·w + (1−β2)·(ĝ·ĝ),
/// the fresh variance, beside v, which stays.
struct FrozenLamb {
  float beta1, one_minus_beta1, inverse, beta2, one_minus_beta2;  ///< inverse: 1/(1−β1)
  float eps, decay;

  /// `sent`: the new momentum. Gives what is measured: m/(√v + eps), that + wd·p, and
  /// (√v + eps)/(√w + eps).
  template <class Math, class F>
  SHERD_RULE void operator()(Math, F p, F sent, F& m, F v, F& fresh, F& direction, F& update,
                             F& ratio) const {
    const F now = v > 0.0f ? sent : 0.0f * v;
    const F g = (now - beta1 * m) * inverse;
    m = now;
    fresh = beta2 * fresh + one_minus_beta2 * (g * g);
    const F denominator = Math::root(v) + eps;
    direction = m / denominator;
    update = direction + decay * p;
    ratio = denominator / (Math::root(fresh) + eps);
  }

  static FrozenLamb make(const config::OptimizerRule& hyper, bool decays);
};

}  // namespace sherd::optim
