#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// a + b; equal shapes.
Var add(const Var& a, const Var& b);
/// a·b, element by element; equal shapes.
Var multiply(const Var& a, const Var& b);
/// x·factor
Var scale(const Var& x, double factor);
/// The same elements under another shape of equal size; shares memory.
Var reshape(const Var& x, const Shape& shape);

/// x in another floating dtype, rounded to nearest; x itself where it has that dtype. The gradient comes back
/// in x's dtype. Selective recompute makes it again from x.
Var cast(const Var& x, DType dtype);

/// act(x); kinds in tensor::Activation. Selective recompute makes it again from x.
Var activation(const Var& x, tensor::Activation kind);
/// GELU in its tanh approximation, as GPT-2 has it.
Var gelu(const Var& x);
Var tanh(const Var& x);
Var relu(const Var& x);
/// silu(gate)·up for x = [gate | up] along the last extent (Shazeer 2020, "GLU variants improve
/// transformer"). x: [..., 2f]; the result: [..., f]. Selective recompute makes it again from x.
Var swiglu(const Var& x);

}  // namespace sherd::autograd
