#pragma once

#include "autograd/tape.h"

// Shared by the gradients of operations, in this room and in sharding/parallel.
namespace sherd::autograd {

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

}  // namespace sherd::autograd
