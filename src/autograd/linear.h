#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

using tensor::Activation;

/// act(x·wᵀ + b). x: [..., in]; w: [out, in]; b: [out] or undefined; the result: [..., out].
///
/// With an activation the sum before it is kept for backward, and selective recompute makes the result again
/// from it. Weight gradients go straight into the parameters' gradient memory, in its dtype.
Var linear(const Var& x, const Var& w, const Var& b = {}, Activation activation = Activation::none);

/// op(a)·op(b), where op transposes when asked. a: [m,k] or [k,m]; b: [k,n] or [n,k]; the result: [m,n].
Var matmul(const Var& a, const Var& b, bool trans_a = false, bool trans_b = false);

}  // namespace sherd::autograd
