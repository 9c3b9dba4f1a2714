#include "autograd/ops.h"

#include "autograd/key_cache.h"
#include "autograd/linear_products.h"

namespace sherd::autograd {

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

Tensor spread_out(Tape& tape, const Tensor& x, const RowSpread& to, double elsewhere) {
  if (to.as_it_is()) return x;
  Tensor out = tape.empty({to.rows, to.blocks * x.shape()[1]}, x.dtype());
  tape.kernels().fill(out, elsewhere);
  copy_runs(tape.kernels(), x, out, to.runs, false);
  return out;
}

/// The gradient of a matrix of shape `shape`, given that of what it was spread out to.
Tensor gathered(Tape& tape, const Tensor& of_spread, const Shape& shape, const RowSpread& to) {
  Tensor out = tape.empty(shape, of_spread.dtype());
  std::int64_t taken = 0;
  for (const SpreadRows& run : to.runs) taken += run.count;
  if (taken < shape[0]) tape.kernels().fill(out, 0);
  copy_runs(tape.kernels(), out, of_spread, to.runs, true);
  return out;
}

/// Backward of linear_onto(), of an adapter's products, which are small: not in FP8.
struct OntoBackward {
  LinearProducts products;
  LinearProducts::Input x;
  Saved w;
  GradRef dy_ref, dx, dw;
  Shape x_shape, w_shape;
  RowSpread to;
  std::vector<std::int64_t> sources;

  void weight_gradient(Tape& tape, const Tensor& dy) {
    if (to.as_it_is()) {
      if (sources.empty())
        products.weight_gradient(tape, dw, w_shape, dy, x);
      else
        products.weight_gradient_by_source(tape, dw, w_shape, dy, x, sources);
      return;
    }
    if (!dw) return;
    const std::int64_t rows = dy.shape().rows();
    const Tensor of_rows = dy.reshape({rows, to.rows}), kept = x.get(tape),
                 low = kept.reshape({rows, kept.shape().back()});
    const std::vector<std::int64_t> all{rows};
    write_by_source(tape, dw, w_shape, dy.dtype(), sources.empty() ? all : sources, false,
                    [&](const SourceRows& of, const Tensor& out, bool add, std::optional<DType>) {
                      const Tensor whole = tape.empty({to.rows, low.shape()[1]}, out.dtype());
                      tape.kernels().matmul({.a = of_rows.rows(of.begin, of.end),
                                             .b = low.rows(of.begin, of.end),
                                             .c = whole,
                                             .trans_a = true});
                      const Tensor gradient = gathered(tape, whole, w_shape, to);
                      if (add)
                        tape.kernels().add(out, gradient, out);
                      else
                        tape.kernels().copy(gradient, out);
                    });
  }
  void operator()(Tape& tape, Tensor dy) {
    weight_gradient(tape, dy);
    if (dx) products.input_gradient(tape, dx, x_shape, dy, spread_out(tape, w.get(tape), to, 0));
    if (dy_ref) tape.accumulate(dy_ref, std::move(dy));
  }
};

}  // namespace

Var spread(const Var& x, const RowSpread& to, double elsewhere) {
  Tape& tape = x.tape();
  require(x.shape().rank() == 2, "spread takes a matrix, not ", x.shape().str());
  if (to.as_it_is()) return x;
  return tape.record(spread_out(tape, x.value(), to, elsewhere), {x},
                     [dx = x.grad_ref(), shape = x.shape(), to](Tape& t, const Tensor& dy) {
                       t.accumulate(dx, gathered(t, dy, shape, to));
                     });
}

Var linear_onto(const Var& y, const Var& x, const Var& w, const RowSpread& to,
                std::vector<std::int64_t> sources, bool adds) {
  Tape& tape = x.tape();
  const bool spreads = !to.as_it_is();
  const Shape v{spreads ? to.rows : w.shape()[0], (spreads ? to.blocks : 1) * w.shape()[1]};
  check_linear(x.shape(), v);
  require(y.shape().back() == v[0] && y.shape().rows() == x.shape().rows(), "linear_onto: ", x.shape().str(),
          " times ", v.str(), " is not of shape ", y.shape().str());
  // A row's bits must not depend on how many continue texts beside it.
  if (tape.key_cache) return adds ? add(y, linear(x, spread(w, to, 0))) : y;
  if (sources.size() == 1) sources.clear();
  Tensor out = y.value();
  if (adds)
    tape.kernels().matmul({.a = x.value(),
                           .b = spread_out(tape, w.value(), to, 0),
                           .c = out,
                           .trans_b = true,
                           .accumulate = true});
  OntoBackward backward{.x = w.requires_grad() ? LinearProducts::Input(x) : LinearProducts::Input(),
                        .w = x.requires_grad() ? Saved(w) : Saved(),
                        .dy_ref = y.grad_ref(),
                        .dx = x.grad_ref(),
                        .dw = w.grad_ref(),
                        .x_shape = x.shape(),
                        .w_shape = w.shape(),
                        .to = to,
                        .sources = std::move(sources)};
  return tape.record(std::move(out), {y, x, w}, std::move(backward));
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
