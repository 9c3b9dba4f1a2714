#include "autograd/ops.h"

#include "autograd/key_cache.h"
#include "autograd/linear_products.h"

namespace sherd::autograd {

Var linear_onto(const Var& y, const Var& x, const Var& w) {
  Tape& tape = x.tape();
  check_linear(x.shape(), w.shape());
  require(y.shape().back() == w.shape()[0] && y.shape().rows() == x.shape().rows(),
          "linear_onto: ", x.shape().str(), " times ", w.shape().str(), " is not of shape ", y.shape().str());
  // A row's bits must not depend on how many continue texts beside it.
  if (tape.key_cache) return add(y, linear(x, w));
  Tensor out = y.value();
  tape.kernels().matmul({.a = x.value(), .b = w.value(), .c = out, .trans_b = true, .accumulate = true});
  const LinearProducts products;  // an adapter's, which are small: not in FP8
  auto backward = [products, kx = w.requires_grad() ? LinearProducts::Input(x) : LinearProducts::Input(),
                   kw = x.requires_grad() ? Saved(w) : Saved(), dy_ref = y.grad_ref(), dx = x.grad_ref(),
                   dw = w.grad_ref(), x_shape = x.shape(), w_shape = w.shape()](Tape& t, Tensor dy) mutable {
    products.weight_gradient(t, dw, w_shape, dy, kx);
    if (dx) products.input_gradient(t, dx, x_shape, dy, kw.get(t));
    if (dy_ref) t.accumulate(dy_ref, std::move(dy));
  };
  return tape.record(std::move(out), {y, x, w}, std::move(backward));
}

namespace {

/// Copies the runs from x to `out`, or back.
void copy_runs(tensor::Kernels& kernels, const Tensor& x, const Tensor& out,
               const std::vector<SpreadRows>& runs, bool back) {
  const std::int64_t columns = x.shape()[1], stride = out.shape()[1];
  for (const SpreadRows& run : runs) {
    const tensor::StridedRows one{x, run.from * columns, columns},
        other{out, run.to * stride + run.column * columns, stride};
    if (back)
      kernels.copy_rows(other, one, run.count, columns);
    else
      kernels.copy_rows(one, other, run.count, columns);
  }
}

}  // namespace

Var spread(const Var& x, const std::vector<SpreadRows>& runs, std::int64_t rows, std::int64_t blocks,
           double elsewhere) {
  Tape& tape = x.tape();
  require(x.shape().rank() == 2, "spread takes a matrix, not ", x.shape().str());
  Tensor out = tape.empty({rows, blocks * x.shape()[1]}, x.dtype());
  tape.kernels().fill(out, elsewhere);
  copy_runs(tape.kernels(), x.value(), out, runs, false);
  return tape.record(std::move(out), {x},
                     [dx = x.grad_ref(), shape = x.shape(), runs](Tape& t, const Tensor& dy) {
                       Tensor gradient = t.empty(shape, dy.dtype());
                       std::int64_t taken = 0;
                       for (const SpreadRows& run : runs) taken += run.count;
                       if (taken < shape[0]) t.kernels().fill(gradient, 0);
                       copy_runs(t.kernels(), gradient, dy, runs, true);
                       t.accumulate(dx, std::move(gradient));
                     });
}

namespace {

/// f for each row of `shape`.
Tensor for_each_row(Tape& tape, const Tensor& f, const Shape& shape) {
  Tensor out = tape.empty(shape, f.dtype());
  tape.kernels().fill(out, 0);
  const Tensor rows = out.reshape({shape.rows(), 1, f.numel()});
  tape.kernels().add_positions(rows, f.reshape({1, f.numel()}), rows);
  return out;
}

}  // namespace

Var scale_columns(const Var& x, const Var& f) {
  Tape& tape = x.tape();
  require(f.shape() == Shape{x.shape().back()}, "scale_columns: ", f.shape().str(),
          " factors for columns of ", x.shape().str());
  Tensor out = for_each_row(tape, f.value(), x.shape());
  tape.kernels().multiply(x.value(), out, out);
  auto backward = [kx = f.requires_grad() ? Saved(x) : Saved(), kf = x.requires_grad() ? Saved(f) : Saved(),
                   dx = x.grad_ref(), df = f.grad_ref(), f_shape = f.shape()](Tape& t, const Tensor& dy) {
    if (df) {
      Tensor products = t.empty(dy.shape(), dy.dtype());
      t.kernels().multiply(dy, kx.get(t), products);
      bias_gradient(t, df, products);
    }
    if (dx) {
      Tensor gradient = for_each_row(t, kf.get(t), dy.shape());
      t.kernels().multiply(dy, gradient, gradient);
      t.accumulate(dx, std::move(gradient));
    }
  };
  return tape.record(std::move(out), {x, f}, std::move(backward));
}

}  // namespace sherd::autograd
