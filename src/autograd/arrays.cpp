#include "autograd/ops.h"

#include <algorithm>
#include <numeric>

#include "autograd/gradients.h"

namespace sherd::autograd {
namespace {

using tensor::AxisExtents;

/// Copies indices [begin, begin + count) of an axis of `whole` to or from `part`, which holds these alone.
struct AxisPart {
  AxisExtents axis;
  std::int64_t begin, count;

  tensor::StridedRows of_whole(const Tensor& whole) const {
    return {whole, begin * axis.inner, axis.extent * axis.inner};
  }
  tensor::StridedRows of_part(const Tensor& part) const { return {part, 0, columns()}; }
  std::int64_t columns() const { return count * axis.inner; }
};

/// x's axes in another order; `axes` are 0 … rank - 1.
Tensor permuted(Tape& tape, const Tensor& x, const std::vector<int>& axes) {
  const tensor::Strides dense = tensor::dense_strides(x.shape());
  std::vector<std::int64_t> dims;
  tensor::Strides strides{};
  for (std::size_t i = 0; i < axes.size(); ++i) {
    dims.push_back(x.shape()[axes[i]]);
    strides[i] = dense[static_cast<std::size_t>(axes[i])];
  }
  Tensor out = tape.empty(Shape(std::span<const std::int64_t>(dims)), x.dtype());
  tape.kernels().copy_strided(x, strides, out);
  return out;
}

std::vector<int> counted(const char* name, const Shape& shape, std::vector<int> axes) {
  const int rank = shape.rank();
  for (int& axis : axes) axis += axis < 0 ? rank : 0;
  std::vector<int> sorted = axes, all(static_cast<std::size_t>(rank));
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), 0);
  require(sorted == all, name, ": the axes of ", shape.str(), " must each be named once");
  return axes;
}

}  // namespace

Var reshape(const Var& x, const Shape& shape) {
  Tensor out = x.value().reshape(shape);
  return x.tape().record(
      std::move(out), {x},
      [dx = x.grad_ref(), before = x.shape()](Tape& t, const Tensor& dy) {
        t.accumulate(dx, dy.reshape(before));
      },
      [kept = Saved(x), shape](Tape& t) { return kept.get(t).reshape(shape); });
}

Var slice(const Var& x, int axis, std::int64_t begin, std::int64_t end) {
  Tape& tape = x.tape();
  const AxisPart part{tensor::axis_of("slice", x.shape(), axis), begin, end - begin};
  require(0 <= begin && begin <= end && end <= part.axis.extent, "slice: [", begin, ", ", end,
          ") is not within axis ", axis, " of ", x.shape().str());
  Tensor out = tape.empty(x.shape().with(axis, part.count), x.dtype());
  tape.kernels().copy_rows(part.of_whole(x.value()), part.of_part(out), part.axis.outer, part.columns());
  return tape.record(
      std::move(out), {x},
      [dx = x.grad_ref(), shape = x.shape(), dtype = x.dtype(), part](Tape& t, const Tensor& dy) {
        write_kernel_grad(t, dx, shape, dtype, [&](const Tensor& to, bool add) {
          if (!add) t.kernels().fill(to, 0);
          t.kernels().copy_rows(part.of_part(dy), part.of_whole(to), part.axis.outer, part.columns(), add);
        });
      });
}

Var concat(std::span<const Var> parts, int axis) {
  require(!parts.empty(), "concat: there must be one value at least");
  Tape& tape = parts[0].tape();
  const Var& first = parts[0];
  AxisExtents all = tensor::axis_of("concat", first.shape(), axis);
  all.extent = 0;
  std::vector<AxisPart> places;
  for (const Var& each : parts) {
    require(each.shape().rank() == first.shape().rank() && each.dtype() == first.dtype() &&
                each.shape().with(axis, 0) == first.shape().with(axis, 0),
            "concat: ", name_of(each.dtype()), " ", each.shape().str(), " does not go behind ",
            name_of(first.dtype()), " ", first.shape().str(), " along axis ", axis);
    const std::int64_t count = tensor::axis_of("concat", each.shape(), axis).extent;
    places.push_back({{}, all.extent, count});
    all.extent += count;
  }
  Tensor out = tape.empty(first.shape().with(axis, all.extent), first.dtype());
  std::vector<GradRef> refs;
  std::vector<Shape> shapes;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    places[i].axis = all;
    tape.kernels().copy_rows(places[i].of_part(parts[i].value()), places[i].of_whole(out), all.outer,
                             places[i].columns());
    refs.push_back(parts[i].grad_ref());
    shapes.push_back(parts[i].shape());
  }
  auto backward = [refs = std::move(refs), shapes = std::move(shapes), places = std::move(places)](
                      Tape& t, const Tensor& dy) {
    for (std::size_t i = 0; i < refs.size(); ++i) {
      if (!refs[i]) continue;
      Tensor grad = t.empty(shapes[i], dy.dtype());
      t.kernels().copy_rows(places[i].of_whole(dy), places[i].of_part(grad), places[i].axis.outer,
                            places[i].columns());
      t.accumulate(refs[i], std::move(grad));
    }
  };
  return tape.record(std::move(out), parts, std::move(backward));
}

Var permute(const Var& x, const std::vector<int>& axes) {
  const std::vector<int> order = counted("permute", x.shape(), axes);
  std::vector<int> inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    inverse[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  return x.tape().record(
      permuted(x.tape(), x.value(), order), {x},
      [dx = x.grad_ref(), inverse](Tape& t, const Tensor& dy) { t.accumulate(dx, permuted(t, dy, inverse)); },
      [kept = Saved(x), order](Tape& t) { return permuted(t, kept.get(t), order); });
}

Var transpose(const Var& x, int a, int b) {
  const int rank = x.shape().rank();
  require(a >= -rank && a < rank && b >= -rank && b < rank, "transpose: ", x.shape().str(), " has no axes ",
          a, " and ", b);
  std::vector<int> axes(static_cast<std::size_t>(rank));
  std::iota(axes.begin(), axes.end(), 0);
  std::swap(axes[static_cast<std::size_t>(a < 0 ? a + rank : a)],
            axes[static_cast<std::size_t>(b < 0 ? b + rank : b)]);
  return permute(x, axes);
}

}  // namespace sherd::autograd
