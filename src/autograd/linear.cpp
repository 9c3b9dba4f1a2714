#include "autograd/linear.h"

#include "autograd/gradients.h"

namespace sherd::autograd {
namespace {

void write_product(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype, tensor::Matmul product) {
  write_kernel_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add) {
    product.c = to;
    product.accumulate = add;
    tape.kernels().matmul(product);
  });
}

/// What a linear layer's backward reads. Only what some wanted gradient needs is kept.
struct LinearBackward {
  Saved x, w;
  Tensor pre;  // the sum before the activation
  Activation activation;
  GradRef dx, dw, db;
  Shape x_shape, w_shape;

  void operator()(Tape& tape, Tensor dy) {
    if (activation != Activation::none) {
      Tensor dpre = reuse_or_empty(tape, dy);
      tape.kernels().activation_backward(activation, pre, dy, dpre);
      dy = std::move(dpre);
      pre = {};
    }
    if (db)
      write_kernel_grad(tape, db, Shape{w_shape[0]}, dy.dtype(),
                        [&](const Tensor& to, bool add) { tape.kernels().sum_rows(dy, to, add); });
    if (dw && x.is_parameter()) {  // whose lease ends with the block
      write_product(tape, dw, w_shape, dy.dtype(), {.a = dy, .b = x.get(tape), .trans_a = true});
    } else if (dw) {
      tape.weight_gradient(dw, [dw = dw, shape = w_shape, dy, input = x.get(tape)](Tape& t) {
        write_product(t, dw, shape, dy.dtype(), {.a = dy, .b = input, .trans_a = true});
      });
      x = {};  // the input goes before its gradient comes
    }
    if (dx) write_product(tape, dx, x_shape, dy.dtype(), {.a = std::move(dy), .b = w.get(tape)});
  }
};

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, Activation activation) {
  Tape& tape = x.tape();
  const Shape w_shape = w.shape();
  require(w_shape.rank() == 2 && x.shape().rank() >= 1 && x.shape().back() == w_shape[1],
          "linear: the weight ", w_shape.str(), " does not take inputs of shape ", x.shape().str());
  const bool recorded = tape.recording() && (x.requires_grad() || w.requires_grad() || b.requires_grad());
  Tensor out = tape.empty(x.shape().with_back(w_shape[0]), x.dtype());
  Tensor pre;
  if (recorded && activation != Activation::none) pre = tape.empty(out.shape(), out.dtype());
  tape.kernels().matmul({.a = x.value(),
                         .b = w.value(),
                         .c = out,
                         .trans_b = true,
                         .bias = b.defined() ? b.value() : Tensor(),
                         .activation = activation,
                         .pre_activation = pre});
  if (!recorded) return tape.record(std::move(out), {x, w, b}, nullptr);
  RemakeFn remake;
  if (activation != Activation::none)
    remake = [pre, activation](Tape& t) {
      Tensor again = t.empty(pre.shape(), pre.dtype());
      t.kernels().activation(activation, pre, again);
      return again;
    };
  LinearBackward backward{.x = w.requires_grad() ? Saved(x) : Saved(),
                          .w = x.requires_grad() ? Saved(w) : Saved(),
                          .pre = std::move(pre),
                          .activation = activation,
                          .dx = x.grad_ref(),
                          .dw = w.grad_ref(),
                          .db = b.grad_ref(),
                          .x_shape = x.shape(),
                          .w_shape = w_shape};
  return tape.record(std::move(out), {x, w, b}, std::move(backward), std::move(remake));
}

Var matmul(const Var& a, const Var& b, bool trans_a, bool trans_b) {
  Tape& tape = a.tape();
  require(a.shape().rank() == 2 && b.shape().rank() == 2 &&
              a.shape()[trans_a ? 0 : 1] == b.shape()[trans_b ? 1 : 0],
          "matmul: ", a.shape().str(), trans_a ? "ᵀ" : "", " times ", b.shape().str(), trans_b ? "ᵀ" : "");
  Tensor out = tape.empty({a.shape()[trans_a ? 1 : 0], b.shape()[trans_b ? 0 : 1]}, a.dtype());
  tape.kernels().matmul({.a = a.value(), .b = b.value(), .c = out, .trans_a = trans_a, .trans_b = trans_b});
  auto backward = [ka = Saved(a), kb = Saved(b), da = a.grad_ref(), db = b.grad_ref(), sa = a.shape(),
                   sb = b.shape(), trans_a, trans_b](Tape& t, const Tensor& dy) {
    // C = op(A)·op(B): dA = dC·op(B)ᵀ or its transpose, dB = op(A)ᵀ·dC or its transpose.
    if (da) {
      if (trans_a)
        write_product(t, da, sa, dy.dtype(), {.a = kb.get(t), .b = dy, .trans_a = trans_b, .trans_b = true});
      else
        write_product(t, da, sa, dy.dtype(), {.a = dy, .b = kb.get(t), .trans_b = !trans_b});
    }
    if (db) {
      if (trans_b)
        write_product(t, db, sb, dy.dtype(), {.a = dy, .b = ka.get(t), .trans_a = true, .trans_b = trans_a});
      else
        write_product(t, db, sb, dy.dtype(), {.a = ka.get(t), .b = dy, .trans_a = !trans_a});
    }
  };
  return tape.record(std::move(out), {a, b}, std::move(backward));
}

}  // namespace sherd::autograd
