#pragma once

#include "autograd/tape.h"

// Shared by operations and their gradients, in this room and in sharding/parallel.
namespace sherd::autograd {

using tensor::Activation;

/// Tape::write_grad for kernels. They write gradients in the dtype of their inputs, `dtype`, or in fp32 for
/// narrower ones; where the destination has yet another, `write` fills a temporary that is then converted and
/// added. The destination comes with the wanted shape.
void write_kernel_grad(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                       const std::function<void(const Tensor&, bool)>& write);

/// The same for kernels that can fold their gradient into the sum over micro-batches (Tape::fold_grad()):
/// write(destination, accumulate, fold), with `fold` as in tensor::Matmul.
void write_folded_grad(
    Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
    const std::function<void(const Tensor& to, bool add, std::optional<DType> fold)>& write);

/// The same of a product, whose c, accumulate and fold are set here.
void write_product(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype, tensor::Matmul product);

/// Rows [begin, end) of one source.
struct SourceRows {
  std::int64_t begin, end;
};
/// The same for gradients of rows that come from several sources, `sources` of each, one after the other. Of
/// a parameter that sums these apart (Parameter::grad_sources), each source's are written by themselves; else
/// write() is told all rows. `folds`: it can fold.
void write_by_source(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                     std::span<const std::int64_t> sources, bool folds,
                     const std::function<void(const SourceRows& rows, const Tensor& to, bool add,
                                              std::optional<DType> fold)>& write);

/// Adds `dy` to the gradient of a value of shape `shape` that was repeated to dy's
/// (tensor::broadcast_strides()): the sums over what repeats. Null `ref`: nothing.
void broadcast_gradient(Tape& tape, const GradRef& ref, const Shape& shape, Tensor dy);

/// `dy` itself when nobody else holds its memory, so that an elementwise gradient may overwrite it; else new
/// memory.
Tensor reuse_or_empty(Tape& tape, const Tensor& dy);

// ---- linear layers, beside their products (autograd/linear_products.h) ----

/// Throws Error{usage} unless a weight [out, in] takes inputs [..., in].
void check_linear(const Shape& x, const Shape& w);

/// A linear layer's result and, where backward will want it, the sum before the activation.
struct LinearOutput {
  Tensor out, pre;
};
/// Makes the result again from that sum; null without an activation, where there is no cheap way.
RemakeFn remake_linear_output(const Tensor& pre, Activation activation);

/// The gradient of the sum before the activation. Overwrites dy where nobody else reads it.
Tensor pre_activation_gradient(Tape& tape, Activation activation, const Tensor& pre, Tensor dy);
/// Adds the sum of dy's rows to the bias's gradient.
void bias_gradient(Tape& tape, const GradRef& db, const Tensor& dy);

}  // namespace sherd::autograd
