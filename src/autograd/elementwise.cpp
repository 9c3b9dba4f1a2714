#include "autograd/ops.h"

#include "autograd/gradients.h"

namespace sherd::autograd {

namespace {

/// A kernel of two operands and a result.
using Arithmetic = void (tensor::Kernels::*)(const Tensor&, const Tensor&, const Tensor&);

Tensor combined(const char* name, const Var& a, const Var& b, Arithmetic kernel) {
  Tape& tape = a.tape();
  Tensor out = tape.empty(tensor::broadcast_shape(name, a.shape(), b.shape()), a.dtype());
  (tape.kernels().*kernel)(a.value(), b.value(), out);
  return out;
}

/// dy, or what its memory may be overwritten with, times or over `x`.
Tensor slope(Tape& tape, const Tensor& dy, const Tensor& x, Arithmetic kernel, bool may_reuse) {
  Tensor out = may_reuse ? reuse_or_empty(tape, dy) : tape.empty(dy.shape(), dy.dtype());
  (tape.kernels().*kernel)(dy, x, out);
  return out;
}

Tensor negative(Tape& tape, const Tensor& dy) {
  Tensor out = reuse_or_empty(tape, dy);
  tape.kernels().scale(dy, -1, out);
  return out;
}

}  // namespace

Var add(const Var& a, const Var& b) {
  return a.tape().record(
      combined("add", a, b, &tensor::Kernels::add), {a, b},
      [da = a.grad_ref(), db = b.grad_ref(), sa = a.shape(), sb = b.shape()](Tape& t, Tensor dy) {
        broadcast_gradient(t, da, sa, dy);
        broadcast_gradient(t, db, sb, std::move(dy));
      });
}

Var subtract(const Var& a, const Var& b) {
  return a.tape().record(
      combined("subtract", a, b, &tensor::Kernels::subtract), {a, b},
      [da = a.grad_ref(), db = b.grad_ref(), sa = a.shape(), sb = b.shape()](Tape& t, Tensor dy) {
        broadcast_gradient(t, da, sa, dy);
        if (db) broadcast_gradient(t, db, sb, negative(t, dy));
      });
}

Var multiply(const Var& a, const Var& b) {
  auto backward = [ka = b.requires_grad() ? Saved(a) : Saved(), kb = a.requires_grad() ? Saved(b) : Saved(),
                   da = a.grad_ref(), db = b.grad_ref(), sa = a.shape(),
                   sb = b.shape()](Tape& t, const Tensor& dy) {
    if (da) broadcast_gradient(t, da, sa, slope(t, dy, kb.get(t), &tensor::Kernels::multiply, !db));
    if (db) broadcast_gradient(t, db, sb, slope(t, dy, ka.get(t), &tensor::Kernels::multiply, true));
  };
  return a.tape().record(combined("multiply", a, b, &tensor::Kernels::multiply), {a, b}, std::move(backward));
}

Var divide(const Var& a, const Var& b) {
  auto backward = [ka = b.requires_grad() ? Saved(a) : Saved(), kb = Saved(b), da = a.grad_ref(),
                   db = b.grad_ref(), sa = a.shape(), sb = b.shape()](Tape& t, const Tensor& dy) {
    const Tensor divisor = kb.get(t);
    Tensor grad = slope(t, dy, divisor, &tensor::Kernels::divide, true);
    if (db) {  // -dy/b·a/b
      Tensor other = slope(t, grad, ka.get(t), &tensor::Kernels::multiply, !da);
      t.kernels().divide(other, divisor, other);
      t.kernels().scale(other, -1, other);
      broadcast_gradient(t, db, sb, std::move(other));
    }
    broadcast_gradient(t, da, sa, std::move(grad));
  };
  return a.tape().record(combined("divide", a, b, &tensor::Kernels::divide), {a, b}, std::move(backward));
}

Var scale(const Var& x, double factor) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().scale(x.value(), factor, out);
  return tape.record(std::move(out), {x}, [dx = x.grad_ref(), factor](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    t.kernels().scale(dy, factor, grad);
    t.accumulate(dx, std::move(grad));
  });
}

Var cast(const Var& x, DType dtype) {
  const DType before = x.dtype();
  require(is_floating(before) && is_floating(dtype), "cast: ", name_of(before), " to ", name_of(dtype),
          ": both must be floating");
  if (before == dtype) return x;
  return x.tape().record(
      x.tape().converted(x.value(), dtype), {x},
      [dx = x.grad_ref(), before](Tape& t, const Tensor& dy) { t.accumulate(dx, t.converted(dy, before)); },
      [kept = Saved(x), dtype](Tape& t) { return t.converted(kept.get(t), dtype); });
}

Var activation(const Var& x, tensor::Activation kind) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().activation(kind, x.value(), out);
  auto backward = [kept = Saved(x), dx = x.grad_ref(), kind](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    t.kernels().activation_backward(kind, kept.get(t), dy, grad);
    t.accumulate(dx, std::move(grad));
  };
  auto remake = [kept = Saved(x), kind](Tape& t) {
    const Tensor input = kept.get(t);
    Tensor again = t.empty(input.shape(), input.dtype());
    t.kernels().activation(kind, input, again);
    return again;
  };
  return tape.record(std::move(out), {x}, std::move(backward), std::move(remake));
}

Var gelu(const Var& x) {
  return activation(x, tensor::Activation::gelu_tanh);
}

Var sigmoid(const Var& x) {
  return activation(x, tensor::Activation::sigmoid);
}

Var exp(const Var& x) {
  return activation(x, tensor::Activation::exp);
}

Var log(const Var& x) {
  return activation(x, tensor::Activation::log);
}

namespace {

/// An operation whose gradient is made from its result.
Var from_result(const Var& x, void (tensor::Kernels::*forward)(const Tensor& x, const Tensor& y),
                Arithmetic backward) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  (tape.kernels().*forward)(x.value(), out);
  return tape.record(out, {x}, [y = out, dx = x.grad_ref(), backward](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    (t.kernels().*backward)(y, dy, grad);
    t.accumulate(dx, std::move(grad));
  });
}

Tensor make_glu(Tape& tape, tensor::Glu kind, const Tensor& x) {
  Tensor out = tape.empty(x.shape().with_back(x.shape().back() / 2), x.dtype());
  tape.kernels().glu(kind, x, out);
  return out;
}

}  // namespace

Var tanh(const Var& x) {
  return from_result(x, &tensor::Kernels::tanh, &tensor::Kernels::tanh_backward);
}

Var relu(const Var& x) {
  return from_result(x, &tensor::Kernels::relu, &tensor::Kernels::relu_backward);
}

Var glu(const Var& x, tensor::Glu kind) {
  Tape& tape = x.tape();
  require(x.shape().rank() >= 1 && x.shape().back() % 2 == 0, "glu: the last extent of ", x.shape().str(),
          " must be even, gate and up side by side");
  auto backward = [kept = Saved(x), dx = x.grad_ref(), kind](Tape& t, const Tensor& dy) {
    const Tensor input = kept.get(t);
    Tensor grad = t.empty(input.shape(), input.dtype());
    t.kernels().glu_backward(kind, input, dy, grad);
    t.accumulate(dx, std::move(grad));
  };
  return tape.record(make_glu(tape, kind, x.value()), {x}, std::move(backward),
                     [kept = Saved(x), kind](Tape& t) { return make_glu(t, kind, kept.get(t)); });
}

}  // namespace sherd::autograd
