#pragma once

#include "autograd/tape.h"
#include "sharding/parallel/layout.h"

namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;
using tensor::Tensor;

/// This context rank's inner part of sequences that every rank holds whole: ids [batch, S], int32, give
/// [batch, S/c]; over one rank, ids itself. Throws Error{data} where S is not a multiple of
/// layout.sequence_multiple().
Tensor inner_part(tensor::Kernels& kernels, const Tensor& ids, const Layout& layout);

/// The ids among [batch, rows] of the inner part that this rank's part of the stream has.
Tensor stream_part(tensor::Kernels& kernels, const Tensor& inner, const Layout& layout);

/// The reverse for values: the inner parts of all context ranks, [batch, rows, width] each, as the whole
/// sequence [batch, c·rows, width] on every rank, in the order of positions. The gradient of each rank's part
/// is its part of the gradient: all ranks do the same with the whole. Parameters that are used behind it find
/// their whole gradient on every context rank, which a training sums: scale that by 1/c, or use none.
Var gather_sequence(const Var& inner, const Layout& layout);

}  // namespace sherd::parallel
