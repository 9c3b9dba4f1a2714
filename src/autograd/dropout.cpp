#include "autograd/dropout.h"

#include "autograd/elementwise.h"
#include "autograd/gradients.h"

namespace sherd::autograd {
namespace {

void check(float p) {
  require(p >= 0.0f && p < 1.0f, "the dropout probability must be in [0, 1), not ", p);
}

void pass_through_mask(Tape& tape, const GradRef& dx, const Tensor& dy, float p, RandomKey key) {
  Tensor grad = reuse_or_empty(tape, dy);
  tape.kernels().dropout_backward(dy, p, key, grad);
  tape.accumulate(dx, std::move(grad));
}

}  // namespace

Var dropout(const Var& x, float p, RandomKey key) {
  check(p);
  Tape& tape = x.tape();
  if (p == 0.0f || !tape.training) return x;
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().dropout(x.value(), Tensor(), p, key, out);
  return tape.record(std::move(out), {x}, [dx = x.grad_ref(), p, key](Tape& t, const Tensor& dy) {
    pass_through_mask(t, dx, dy, p, key);
  });
}

Var dropout_add(const Var& x, const Var& residual, float p, RandomKey key) {
  check(p);
  Tape& tape = x.tape();
  if (p == 0.0f || !tape.training) return add(x, residual);
  require(x.shape() == residual.shape(), "dropout_add: shapes ", x.shape().str(), " and ",
          residual.shape().str(), " differ");
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().dropout(x.value(), residual.value(), p, key, out);
  auto backward = [dx = x.grad_ref(), dresidual = residual.grad_ref(), p, key](Tape& t, const Tensor& dy) {
    t.accumulate(dresidual, dy);
    if (dx) pass_through_mask(t, dx, dy, p, key);
  };
  return tape.record(std::move(out), {x, residual}, std::move(backward));
}

}  // namespace sherd::autograd
