#include "autograd/ops.h"

#include "autograd/gradients.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

using tensor::AxisExtents;

/// The shape that is left of x.
Shape folded(const Shape& shape, int axis, bool keep) {
  if (axis < 0) axis += shape.rank();
  std::vector<std::int64_t> dims;
  for (int k = 0; k < shape.rank(); ++k)
    if (k != axis || keep) dims.push_back(k == axis ? 1 : shape[k]);
  if (dims.empty()) dims.push_back(1);
  return Shape(std::span<const std::int64_t>(dims));
}

/// dy, times a factor, at every element of the axis that was folded.
Tensor spread(Tape& tape, const Tensor& dy, const AxisExtents& axis, double factor, const Shape& shape,
              DType dtype) {
  Tensor small = dy;
  if (factor != 1) {
    small = tape.empty(dy.shape(), dy.dtype());
    tape.kernels().scale(dy, factor, small);
  }
  small = tape.converted(small, dtype);
  Tensor out = tape.empty({axis.outer, axis.extent, axis.inner}, dtype);
  tape.kernels().copy_strided(small, {axis.inner, 0, 1}, out);
  return out.reshape(shape);
}

Var scaled_sum(const Var& x, const AxisExtents& axis, double factor, const Shape& shape, DType dtype) {
  Tape& tape = x.tape();
  Tensor out = tape.empty(shape, dtype);
  tape.kernels().sum_axis(x.value(), axis, factor, out, false);
  return tape.record(
      std::move(out), {x},
      [dx = x.grad_ref(), axis, factor, before = x.shape(), from = x.dtype()](Tape& t, const Tensor& dy) {
        t.accumulate(dx, spread(t, dy, axis, factor, before, from));
      });
}

/// 1/n, for a mean of n.
double share(const Shape& shape, std::int64_t n) {
  require(n > 0, "mean: there are no elements in ", shape.str());
  return 1 / static_cast<double>(n);
}

Var softmax_of(const Var& x, int axis, bool log) {
  const int rank = x.shape().rank();
  require(axis >= -rank && axis < rank, log ? "log_softmax" : "softmax", ": ", x.shape().str(),
          " has no axis ", axis);
  if (axis != -1 && axis != rank - 1) return transpose(softmax_of(transpose(x, axis, -1), -1, log), axis, -1);
  Tape& tape = x.tape();
  tensor::Softmax args;
  args.log = log;
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().softmax(x.value(), args, out);
  return tape.record(out, {x}, [y = out, dx = x.grad_ref(), args](Tape& t, const Tensor& dy) {
    Tensor grad = reuse_or_empty(t, dy);
    t.kernels().softmax_backward(y, dy, args, grad);
    t.accumulate(dx, std::move(grad));
  });
}

}  // namespace

Var sum(const Var& x) {
  return scaled_sum(x, {1, x.value().numel(), 1}, 1, {1}, tensor::compute_type(x.dtype()));
}

Var mean(const Var& x) {
  const std::int64_t n = x.value().numel();
  return scaled_sum(x, {1, n, 1}, share(x.shape(), n), {1}, tensor::compute_type(x.dtype()));
}

Var sum(const Var& x, int axis, bool keep) {
  return scaled_sum(x, tensor::axis_of("sum", x.shape(), axis), 1, folded(x.shape(), axis, keep), x.dtype());
}

Var mean(const Var& x, int axis, bool keep) {
  const AxisExtents along = tensor::axis_of("mean", x.shape(), axis);
  return scaled_sum(x, along, share(x.shape(), along.extent), folded(x.shape(), axis, keep), x.dtype());
}

Var max(const Var& x, int axis, bool keep) {
  Tape& tape = x.tape();
  const AxisExtents along = tensor::axis_of("max", x.shape(), axis);
  require(along.extent > 0, "max: there are no elements along axis ", axis, " of ", x.shape().str());
  Tensor out = tape.empty(folded(x.shape(), axis, keep), x.dtype());
  tape.kernels().max_axis(x.value(), along, out);
  return tape.record(out, {x},
                     [y = out, kept = Saved(x), dx = x.grad_ref(), along](Tape& t, const Tensor& dy) {
                       const Tensor input = kept.get(t);
                       Tensor grad = t.empty(input.shape(), input.dtype());
                       t.kernels().max_axis_backward(input, y, dy, along, grad);
                       t.accumulate(dx, std::move(grad));
                     });
}

Var softmax(const Var& x, int axis) {
  return softmax_of(x, axis, false);
}

Var log_softmax(const Var& x, int axis) {
  return softmax_of(x, axis, true);
}

}  // namespace sherd::autograd
