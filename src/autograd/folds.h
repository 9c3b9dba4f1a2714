#pragma once

#include "autograd/tape.h"

// What folds the elements along an axis, or along all. Sums are formed in fp32 or wider (fp64 for fp64), in
// an order that the shape alone decides, and round once. Negative axes count from the end. A result without
// its only axis has shape [1].
namespace sherd::autograd {

/// All elements: [1], in fp32 (fp64 for fp64), as losses are. Throws Error{usage} for a mean of none.
Var sum(const Var& x);
Var mean(const Var& x);

/// Along one axis, in x's dtype. `keep`: the axis stays, with one element.
Var sum(const Var& x, int axis, bool keep = false);
Var mean(const Var& x, int axis, bool keep = false);
/// The largest along an axis; a NaN where there is one. The gradient goes to the first that is largest.
Var max(const Var& x, int axis, bool keep = false);

/// e^x over its sum along an axis, and the logarithm of that. -infinity counts as nothing; where nothing is
/// left, softmax gives 0.
Var softmax(const Var& x, int axis = -1);
Var log_softmax(const Var& x, int axis = -1);

}  // namespace sherd::autograd
