#pragma once

#include "optim/rules/rule.h"

namespace sherd::optim {

/// The direction that Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024)
/// orthogonalises (optim/muon.h): b ← µ·b + (1−µ)·g; u = b, or (1−µ)·g + µ·b with Nesterov's. Leaves the
/// weight alone: u comes in its place.
struct MuonDirection {
  static constexpr int state_count = 1;
  static constexpr int watched = 0;

  float momentum, one_minus_momentum;
  float decay;  ///< none: the weight decays as the orthogonalised matrix is added
  bool nesterov;

  template <class Math, class F>
  SHERD_RULE void operator()(Math, F& p, F g, F& b) const {
    const F own = one_minus_momentum * g;
    b = momentum * b + own;
    p = nesterov ? own + momentum * b : b;
  }

  static bool serves(const config::OptimizerRule& hyper);
  static Description describe(const config::OptimizerRule& hyper);
  static MuonDirection make(const config::OptimizerRule& hyper, std::int64_t step, const SpanTerms& terms);
  friend bool operator==(const MuonDirection&, const MuonDirection&) = default;
};

}  // namespace sherd::optim
