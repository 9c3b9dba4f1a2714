#include "autograd/gradients.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "tensor/argument_checks.h"

namespace sherd::autograd {

void write_kernel_grad(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                       const std::function<void(const Tensor&, bool)>& write) {
  tape.write_grad(ref, shape, dtype, [&](const Tensor& to, bool add) {
    if (to.dtype() == dtype || (to.dtype() == DType::f32 && dtype != DType::f64)) {
      write(to.reshape(shape), add);
      return;
    }
    Tensor made = tape.empty(shape, dtype);
    write(made, false);
    if (add)
      tape.kernels().add(to, tape.converted(made, to.dtype()).reshape(to.shape()), to);
    else
      tape.kernels().copy(made, to);
  });
}

void write_folded_grad(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                       const std::function<void(const Tensor&, bool, std::optional<DType>)>& write) {
  const bool folded = tape.fold_grad(ref, shape, dtype, [&](const Tensor& to, bool add, DType rounding) {
    write(to.reshape(shape), add, rounding);
  });
  if (!folded)
    write_kernel_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add) { write(to, add, {}); });
}

void write_product(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype, tensor::Matmul product) {
  write_folded_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add, std::optional<DType> fold) {
    product.c = to;
    product.accumulate = add;
    product.fold = fold;
    tape.kernels().matmul(product);
  });
}

namespace {

/// Gradients by source, into where they are summed or each by itself.
class SourceWriter {
 public:
  using Write = std::function<void(const SourceRows&, const Tensor&, bool, std::optional<DType>)>;
  SourceWriter(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype, bool folds,
               const Write& write)
      : tape_(tape), ref_(ref), shape_(shape), dtype_(dtype), folds_(folds), write_(write) {}

  void run(std::span<const std::int64_t> sources) {
    Parameter& parameter = *ref_->parameter;
    require(std::ssize(sources) == parameter.grad_sources && !parameter.grad_written &&
                !parameter.grad_sum.folded,
            "parameter '", parameter.name, "' takes one gradient from each of ", parameter.grad_sources,
            " sources, not another one, or of ", sources.size());
    const Tensor first = parameter.grad;
    const bool summed = parameter.grad_sum.to.defined();
    std::int64_t begin = 0;
    for (std::size_t source = 0; source < sources.size(); ++source) {
      const SourceRows rows{begin, begin + sources[source]};
      begin = rows.end;
      if (summed) {
        fold(rows, parameter.grad_sum, parameter.grad_sum.onto || source > 0);
      } else {
        parameter.grad = source == 0 ? first : parameter.source_grads[source - 1];
        write_apart(rows);
      }
    }
    parameter.grad = first;
    parameter.grad_sum.folded = summed;
    parameter.grad_written = parameter.sources_written = !summed;
  }

 private:
  void fold(const SourceRows& rows, const GradientSum& sum, bool onto) {
    if (rows.begin == rows.end) {
      if (!onto) tape_.kernels().fill(sum.to, 0);
    } else if (folds_ && tape_.kernels().folds_gradients() && dtype_ != DType::f64 &&
               (sum.to.dtype() == dtype_ || sum.to.dtype() == DType::f32)) {
      write_(rows, sum.to.reshape(shape_), onto, sum.rounding);
    } else {
      write_apart(rows);
      tape_.kernels().fold(ref_->parameter->grad, sum.rounding, sum.to, onto);
    }
  }
  void write_apart(const SourceRows& rows) {
    ref_->parameter->grad_written = false;
    if (rows.begin == rows.end) return tape_.kernels().fill(ref_->parameter->grad, 0);
    write_kernel_grad(tape_, ref_, shape_, dtype_,
                      [&](const Tensor& to, bool add) { write_(rows, to, add, {}); });
  }

  Tape& tape_;
  const GradRef& ref_;
  const Shape& shape_;
  DType dtype_;
  bool folds_;
  const Write& write_;
};

}  // namespace

void write_by_source(
    Tape& tape, const GradRef& ref, const Shape& shape, DType dtype, std::span<const std::int64_t> sources,
    bool folds,
    const std::function<void(const SourceRows&, const Tensor&, bool, std::optional<DType>)>& write) {
  if (!ref) return;
  if (ref->parameter && ref->parameter->grad_sources > 1)
    return SourceWriter(tape, ref, shape, dtype, folds, write).run(sources);
  const SourceRows all{0, std::accumulate(sources.begin(), sources.end(), std::int64_t{0})};
  if (folds)
    write_folded_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add, std::optional<DType> fold) {
      write(all, to, add, fold);
    });
  else
    write_kernel_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add) { write(all, to, add, {}); });
}

namespace {

/// The axes, each a run of neighbours, over which an array of shape `from` is summed to become one of `to`;
/// from the outermost on, each as it lies when those before have gone.
std::vector<tensor::AxisExtents> summed_axes(const Shape& from, const Shape& to) {
  std::vector<std::int64_t> dims(from.dims().begin(), from.dims().end());
  const int missing = from.rank() - to.rank();
  const auto repeats = [&](int k) { return from[k] != 1 && (k < missing || to[k - missing] == 1); };
  const auto product = [&](int begin, int end) {
    return std::accumulate(dims.begin() + begin, dims.begin() + end, std::int64_t{1}, std::multiplies<>());
  };
  std::vector<tensor::AxisExtents> out;
  for (int k = 0; k < from.rank(); ++k) {
    if (!repeats(k)) continue;
    int end = k + 1;
    while (end < from.rank() && (repeats(end) || from[end] == 1)) ++end;
    out.push_back({product(0, k), product(k, end), product(end, from.rank())});
    std::fill(dims.begin() + k, dims.begin() + end, 1);
    k = end - 1;
  }
  return out;
}

}  // namespace

void broadcast_gradient(Tape& tape, const GradRef& ref, const Shape& shape, Tensor dy) {
  if (!ref) return;
  const std::vector<tensor::AxisExtents> axes = summed_axes(dy.shape(), shape);
  if (axes.empty()) return tape.accumulate(ref, dy.shape() == shape ? std::move(dy) : dy.reshape(shape));
  const DType dtype = dy.dtype(), wide = tensor::compute_type(dtype);
  for (std::size_t i = 0; i + 1 < axes.size(); ++i) {
    Tensor part = tape.empty({axes[i].kept()}, wide);
    tape.kernels().sum_axis(dy, axes[i], 1, part, false);
    dy = std::move(part);
  }
  write_kernel_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add) {
    tape.kernels().sum_axis(dy, axes.back(), 1, to, add);
  });
}

Tensor reuse_or_empty(Tape& tape, const Tensor& dy) {
  return dy.storage().unique() ? dy : tape.empty(dy.shape(), dy.dtype());
}

}  // namespace sherd::autograd
