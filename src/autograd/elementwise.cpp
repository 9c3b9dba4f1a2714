#include "autograd/elementwise.h"

#include "autograd/gradients.h"

namespace sherd::autograd {

Var add(const Var& a, const Var& b) {
  Tape& tape = a.tape();
  require(a.shape() == b.shape(), "add: shapes ", a.shape().str(), " and ", b.shape().str(), " differ");
  Tensor out = tape.empty(a.shape(), a.dtype());
  tape.kernels().add(a.value(), b.value(), out);
  return tape.record(std::move(out), {a, b}, [da = a.grad_ref(), db = b.grad_ref()](Tape& t, Tensor dy) {
    if (da && db) t.accumulate(da, dy);
    t.accumulate(db ? db : da, std::move(dy));
  });
}

Var multiply(const Var& a, const Var& b) {
  Tape& tape = a.tape();
  require(a.shape() == b.shape(), "multiply: shapes ", a.shape().str(), " and ", b.shape().str(), " differ");
  Tensor out = tape.empty(a.shape(), a.dtype());
  tape.kernels().multiply(a.value(), b.value(), out);
  auto backward = [ka = b.requires_grad() ? Saved(a) : Saved(), kb = a.requires_grad() ? Saved(b) : Saved(),
                   da = a.grad_ref(), db = b.grad_ref()](Tape& t, const Tensor& dy) {
    if (da) {
      Tensor grad = db ? t.empty(dy.shape(), dy.dtype()) : reuse_or_empty(t, dy);
      t.kernels().multiply(dy, kb.get(t), grad);
      t.accumulate(da, std::move(grad));
    }
    if (db) {
      Tensor grad = reuse_or_empty(t, dy);
      t.kernels().multiply(dy, ka.get(t), grad);
      t.accumulate(db, std::move(grad));
    }
  };
  return tape.record(std::move(out), {a, b}, std::move(backward));
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

Var reshape(const Var& x, const Shape& shape) {
  Tensor out = x.value().reshape(shape);
  return x.tape().record(
      std::move(out), {x},
      [dx = x.grad_ref(), before = x.shape()](Tape& t, const Tensor& dy) {
        t.accumulate(dx, dy.reshape(before));
      },
      [kept = Saved(x), shape](Tape& t) { return kept.get(t).reshape(shape); });
}

namespace {

Tensor converted(Tape& tape, const Tensor& x, DType dtype) {
  Tensor out = tape.empty(x.shape(), dtype);
  tape.kernels().copy(x, out);
  return out;
}

}  // namespace

Var cast(const Var& x, DType dtype) {
  const DType before = x.dtype();
  require(is_floating(before) && is_floating(dtype), "cast: ", name_of(before), " to ", name_of(dtype),
          ": both must be floating");
  if (before == dtype) return x;
  return x.tape().record(
      converted(x.tape(), x.value(), dtype), {x},
      [dx = x.grad_ref(), before](Tape& t, const Tensor& dy) { t.accumulate(dx, converted(t, dy, before)); },
      [kept = Saved(x), dtype](Tape& t) { return converted(t, kept.get(t), dtype); });
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

Var tanh(const Var& x) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().tanh(x.value(), out);
  return tape.record(out, {x}, [y = out, dx = x.grad_ref()](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    t.kernels().tanh_backward(y, dy, grad);
    t.accumulate(dx, std::move(grad));
  });
}

Var relu(const Var& x) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().relu(x.value(), out);
  return tape.record(out, {x}, [y = out, dx = x.grad_ref()](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    t.kernels().relu_backward(y, dy, grad);
    t.accumulate(dx, std::move(grad));
  });
}

namespace {

Tensor make_swiglu(Tape& tape, const Tensor& x) {
  Tensor out = tape.empty(x.shape().with_back(x.shape().back() / 2), x.dtype());
  tape.kernels().swiglu(x, out);
  return out;
}

}  // namespace

Var swiglu(const Var& x) {
  Tape& tape = x.tape();
  require(x.shape().rank() >= 1 && x.shape().back() % 2 == 0, "swiglu: the last extent of ", x.shape().str(),
          " must be even, gate and up side by side");
  auto backward = [kept = Saved(x), dx = x.grad_ref()](Tape& t, const Tensor& dy) {
    const Tensor input = kept.get(t);
    Tensor grad = t.empty(input.shape(), input.dtype());
    t.kernels().swiglu_backward(input, dy, grad);
    t.accumulate(dx, std::move(grad));
  };
  return tape.record(make_swiglu(tape, x.value()), {x}, std::move(backward),
                     [kept = Saved(x)](Tape& t) { return make_swiglu(t, kept.get(t)); });
}

}  // namespace sherd::autograd
