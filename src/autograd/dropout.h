#pragma once

#include "autograd/tape.h"
#include "tensor/slice.h"

namespace sherd::autograd {

/// Zeroes each element with probability p and scales the rest by 1/(1-p) (Srivastava et al. 2014). The mask
/// is a function of `key` and the element's index and is made again in backward, so nothing is kept. Gives x
/// itself when p is 0 or the tape is not training.
///
/// `elements`: which ones of a logical tensor x holds, whose mask they get; by default x is all of it. Throws
/// Error{usage} unless 0 <= p < 1 and the slice has as many elements as x.
Var dropout(const Var& x, float p, RandomKey key, const tensor::Slice& elements = {});
/// residual + dropout(x), in one pass.
Var dropout_add(const Var& x, const Var& residual, float p, RandomKey key,
                const tensor::Slice& elements = {});
/// Each element times a number drawn evenly from [1 − spread, 1 + spread], in x's dtype, likewise by `key`
/// and the element's index (Fedus et al. 2021, "Switch transformers"). Throws Error{usage} unless 0 <= spread
/// < 1.
Var jitter(const Var& x, double spread, RandomKey key, const tensor::Slice& elements = {});

}  // namespace sherd::autograd
