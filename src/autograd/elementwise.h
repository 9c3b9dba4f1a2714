#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

// Of two operands, element by element, in one dtype. Where their shapes differ, one or both repeat as NumPy
// has it: axes are matched from the last one on, and extents of 1, or missing ones, repeat. Gradients of what
// repeats are summed in fp32 (fp64 for fp64) in an order that the shapes alone decide, and round once. Throws
// Error{usage} naming the operation and the shapes.
Var add(const Var& a, const Var& b);
Var subtract(const Var& a, const Var& b);
Var multiply(const Var& a, const Var& b);
Var divide(const Var& a, const Var& b);

/// x·factor
Var scale(const Var& x, double factor);

/// x in another floating dtype, rounded to nearest; x itself where it has that dtype. The gradient comes back
/// in x's dtype. Selective recompute makes it again from x.
Var cast(const Var& x, DType dtype);

/// act(x); kinds in tensor::Activation. Selective recompute makes it again from x.
Var activation(const Var& x, tensor::Activation kind);
/// GELU in its tanh approximation, as GPT-2 has it.
Var gelu(const Var& x);
Var sigmoid(const Var& x);
Var exp(const Var& x);
/// The natural logarithm: -infinity of 0, NaN below.
Var log(const Var& x);
Var tanh(const Var& x);
Var relu(const Var& x);
/// silu(gate)·up for x = [gate | up] along the last extent (Shazeer 2020, "GLU variants improve
/// transformer"). x: [..., 2f]; the result: [..., f]. Selective recompute makes it again from x.
Var swiglu(const Var& x);

}  // namespace sherd::autograd
