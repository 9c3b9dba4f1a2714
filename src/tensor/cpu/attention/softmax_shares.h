#pragma once

#include <cmath>
#include <limits>

namespace sherd::tensor::cpu {

/// The weights of two softmaxes over different keys in the one over all of them, and its log-sum-exp.
template <class C>
struct SoftmaxShares {
  C old, part, lse;
};
/// From the two log-sum-exps.
template <class C>
SoftmaxShares<C> shares_of(C old, C part) {
  if (part == -std::numeric_limits<C>::infinity()) return {1, 0, old};  // even where old is -inf too
  const C high = old > part ? old : part, low = old > part ? part : old;
  const C e = std::exp(low - high), inverse = 1 / (1 + e), lse = high + std::log1p(e);
  return old > part ? SoftmaxShares<C>{inverse, e * inverse, lse}
                    : SoftmaxShares<C>{e * inverse, inverse, lse};
}

}  // namespace sherd::tensor::cpu
