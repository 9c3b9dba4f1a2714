#include "tensor/arrays.h"

#include <algorithm>

#include "tensor/argument_checks.h"

namespace sherd::tensor {

Strides dense_strides(const Shape& shape) {
  Strides out{};
  std::int64_t stride = 1;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    out[static_cast<std::size_t>(axis)] = stride;
    stride *= shape[axis];
  }
  return out;
}

Strides broadcast_strides(const char* kernel, const Shape& from, const Shape& to) {
  const Strides dense = dense_strides(from);
  const int missing = to.rank() - from.rank();
  Strides out{};
  bool matches = missing >= 0;
  for (int axis = 0; matches && axis < from.rank(); ++axis) {
    matches = from[axis] == to[axis + missing] || from[axis] == 1;
    if (from[axis] != 1)
      out[static_cast<std::size_t>(axis + missing)] = dense[static_cast<std::size_t>(axis)];
  }
  require(matches, kernel, ": shapes differ: ", from.str(), " and ", to.str(),
          ", and the former does not repeat to the latter; extents must be equal from the last one on, or 1");
  return out;
}

Shape broadcast_shape(const char* kernel, const Shape& a, const Shape& b) {
  const int rank = std::max(a.rank(), b.rank());
  Strides dims{};
  for (int back = 1; back <= rank; ++back) {
    const std::int64_t u = back <= a.rank() ? a[-back] : 1, v = back <= b.rank() ? b[-back] : 1;
    require(u == v || u == 1 || v == 1, kernel, ": shapes differ: ", a.str(), " and ", b.str(),
            "; extents must be equal from the last one on, or 1");
    dims[static_cast<std::size_t>(rank - back)] = u == 1 ? v : u;
  }
  return Shape(std::span<const std::int64_t>(dims.data(), static_cast<std::size_t>(rank)));
}

AxisExtents axis_of(const char* kernel, const Shape& shape, int axis) {
  const int rank = shape.rank();
  require(axis >= -rank && axis < rank, kernel, ": ", shape.str(), " has no axis ", axis);
  if (axis < 0) axis += rank;
  AxisExtents out;
  for (int k = 0; k < rank; ++k) (k < axis ? out.outer : k == axis ? out.extent : out.inner) *= shape[k];
  return out;
}

ArrayLoops array_loops(const Shape& shape, std::initializer_list<Strides> operands) {
  ArrayLoops out;
  for (int axis = 0; axis < shape.rank(); ++axis) {
    const auto k = static_cast<std::size_t>(axis);
    if (shape[axis] == 1) continue;
    const auto last = static_cast<std::size_t>(out.rank - 1);
    bool joins = out.rank > 0;
    std::size_t operand = 0;
    for (const Strides& strides : operands)
      joins = joins && out.strides[operand++][last] == strides[k] * shape[axis];
    const std::size_t to = joins ? last : last + 1;
    out.extents[to] = joins ? out.extents[to] * shape[axis] : shape[axis];
    operand = 0;
    for (const Strides& strides : operands) out.strides[operand++][to] = strides[k];
    out.rank = static_cast<int>(to) + 1;
  }
  if (out.rank == 0) out.rank = 1, out.extents[0] = 1;
  return out;
}

ArrayLoops check_copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) {
  require(from.defined() && to.defined(), "copy_strided: an argument is not defined");
  require(from.dtype() == to.dtype(), "copy_strided: ", name_of(from.dtype()), " to ", name_of(to.dtype()),
          "; convert first (Kernels::copy())");
  std::int64_t last = 0;
  for (int axis = 0; axis < to.shape().rank(); ++axis) {
    const std::int64_t stride = strides[static_cast<std::size_t>(axis)];
    require(stride >= 0, "copy_strided: stride ", stride, " of axis ", axis, " is negative");
    last += (to.shape()[axis] - 1) * stride;
  }
  require(to.numel() == 0 || last < from.numel(), "copy_strided: element ", last, " of ", from.numel(),
          " would be read for ", to.shape().str());
  return array_loops(to.shape(), {strides});
}

ArrayLoops check_broadcast(const char* kernel, const Tensor& a, const Tensor& b, const Tensor& out) {
  require_floating(kernel, "the output", out);
  for (const Tensor* x : {&a, &b}) {
    require(x->defined(), kernel, ": an argument is not defined");
    require(x->dtype() == out.dtype(), kernel, ": dtypes differ: ", name_of(x->dtype()), " and ",
            name_of(out.dtype()), "; convert one first (Kernels::copy(), autograd::cast())");
  }
  return array_loops(out.shape(), {broadcast_strides(kernel, a.shape(), out.shape()),
                                   broadcast_strides(kernel, b.shape(), out.shape())});
}

void check_sum_axis(const Tensor& x, const AxisExtents& axis, const Tensor& out) {
  require_floating("sum_axis", "x", x);
  require(x.numel() == axis.kept() * axis.extent, "sum_axis: ", x.shape().str(), " is not ", axis.outer,
          " times ", axis.extent, " times ", axis.inner);
  require_floating("sum_axis", "out", out);
  require(out.numel() == axis.kept() && compute_type(out.dtype()) == compute_type(x.dtype()),
          "sum_axis: out is ", name_of(out.dtype()), " ", out.shape().str(), " for ", axis.kept(),
          " sums of ", name_of(x.dtype()));
}

bool sums_rows(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out) {
  return axis.outer == 1 && axis.inner > 1 && factor == 1 &&
         (out.dtype() == x.dtype() || out.dtype() == compute_type(x.dtype()));
}

void check_max_axis(const char* kernel, const Tensor& x, const AxisExtents& axis, const Tensor& reduced) {
  require_floating(kernel, "x", x);
  require(x.numel() == axis.kept() * axis.extent && axis.extent > 0, kernel, ": ", x.shape().str(),
          " is not ", axis.outer, " times ", axis.extent, " times ", axis.inner, ", of one or more each");
  require_vector(kernel, "what is left of x", reduced, axis.kept(), x.dtype());
}

void check_softmax(const Tensor& x, const Softmax& args, const Tensor& y) {
  require_floating("softmax", "x", x);
  require_floating("softmax", "y", y);
  require(x.shape().rank() >= 1 && x.shape() == y.shape() &&
              (x.dtype() == y.dtype() || x.dtype() == compute_type(y.dtype())),
          "softmax: x is ", name_of(x.dtype()), " ", x.shape().str(), " and y ", name_of(y.dtype()), " ",
          y.shape().str());
  require(args.causal_rows >= 0, "softmax: ", args.causal_rows, " causal rows");
  require(!args.log || (!args.seen.defined() && args.causal_rows == 0),
          "softmax: the logarithm has no value for hidden columns");
  const std::int64_t columns = x.shape().back();
  if (args.seen.defined()) require_vector("softmax", "seen", args.seen, columns, DType::u8);
  if (!args.distances.defined() || columns == 0) return;
  const std::int64_t rows = args.distance_rows(columns);
  require(!args.log && rows >= 1 && x.shape().rows() % rows == 0 &&
              args.distances.dtype() == compute_type(y.dtype()),
          "softmax: ", name_of(args.distances.dtype()), " ", args.distances.shape().str(),
          " are no distances between rows and columns of ", x.shape().str());
}

void check_softmax_backward(const Tensor& y, const Tensor& dy, const Softmax&, const Tensor& dx) {
  require_alike("softmax_backward", dx, {&y});
  require(dy.defined() && dy.shape() == y.shape() && y.shape().rank() >= 1 &&
              (dy.dtype() == y.dtype() || dy.dtype() == compute_type(y.dtype())),
          "softmax_backward: dy must have the shape of y, ", y.shape().str(), ", and its dtype or fp32");
}

void check_binary_cross_entropy(const char* kernel, const Tensor& logits, const Tensor& targets,
                                const Tensor& weights) {
  require_alike(kernel, logits, {&targets});
  if (weights.defined()) require_alike(kernel, logits, {&weights});
}

}  // namespace sherd::tensor
