#pragma once

#include "autograd/tape.h"

// The parts of linear layers: for autograd::linear(), and for layers that exchange tensors between these
// parts (sharding/parallel/linear.h).
namespace sherd::autograd {

using tensor::Activation;

/// Throws Error{usage} unless a weight [out, in] takes inputs [..., in].
void check_linear(const Shape& x, const Shape& w);

/// A linear layer's result and, where backward will want it, the sum before the activation.
struct LinearOutput {
  Tensor out, pre;
};
/// act(x·wᵀ + b); keeps the sum where `recorded` and there is an activation. `b` may be undefined.
LinearOutput linear_output(Tape& tape, const Tensor& x, const Tensor& w, const Tensor& b,
                           Activation activation, bool recorded);
/// Makes the result again from that sum; null without an activation, where there is no cheap way.
RemakeFn remake_linear_output(const Tensor& pre, Activation activation);

/// The gradient of the sum before the activation. Overwrites dy where nobody else reads it.
Tensor pre_activation_gradient(Tape& tape, Activation activation, const Tensor& pre, Tensor dy);
/// Adds the sum of dy's rows to the bias's gradient.
void bias_gradient(Tape& tape, const GradRef& db, const Tensor& dy);
/// Adds dyᵀ·x to the gradient of a weight of shape `w`, now or when weight gradients are computed. `leased`:
/// x is a parameter, whose lease ends with the block, so now.
void weight_gradient(Tape& tape, const GradRef& dw, const Shape& w, const Tensor& dy, const Tensor& x,
                     bool leased);
/// Adds dy·w to the gradient of an input of shape `x`.
void input_gradient(Tape& tape, const GradRef& dx, const Shape& x, Tensor dy, const Tensor& w);

}  // namespace sherd::autograd
