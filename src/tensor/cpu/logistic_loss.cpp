#include <cmath>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// Σ w·l and Σ w.
struct Sums {
  double loss = 0, weight = 0;
};

double loss_of(double x, double t) {
  return (x > 0 ? x : 0) - x * t + std::log1p(std::exp(-std::fabs(x)));
}

Sums sum_f64(const double* x, const double* t, const double* w, Count n) {
  Sums out;
  for (Count i = 0; i < n; ++i) {
    const double weight = w ? w[i] : 1;
    out.loss += weight * loss_of(x[i], t[i]), out.weight += weight;
  }
  return out;
}

/// Elements [begin, begin + count) of tensors that are not fp64: terms in fp32, their sums in double.
Sums sum_floats(const IsaTable& isa, const Tensor& x, const Tensor& t, const Tensor& w, Count begin,
                Count count) {
  Sums out;
  const ConvertOps& convert = isa.convert[storage_index(x)];
  float values[stack_block], targets[stack_block], weights[stack_block];
  for (Count i = begin; i < begin + count; i += stack_block) {
    const Count n = std::min(stack_block, begin + count - i);
    convert.load(at(x, i), values, n);
    convert.load(at(t, i), targets, n);
    isa.elementwise[storage_f32].logistic_loss(values, targets, values, n);
    if (w.defined()) convert.load(at(w, i), weights, n);
    for (Count k = 0; k < n; ++k) {
      const double weight = w.defined() ? static_cast<double>(weights[k]) : 1;
      out.loss += weight * static_cast<double>(values[k]), out.weight += weight;
    }
  }
  return out;
}

}  // namespace

void CpuKernels::binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                      const Tensor& total) {
  check_binary_cross_entropy("binary_cross_entropy", logits, targets, weights);
  require_vector("binary_cross_entropy", "total", total, 2, DType::f64);
  const Count n = logits.numel();
  std::vector<Sums> parts(static_cast<std::size_t>((n + element_grain - 1) / element_grain));
  in_chunks(device_, n, element_grain, [&](Count begin, Count count) {
    parts[static_cast<std::size_t>(begin / element_grain)] =
        logits.dtype() == DType::f64
            ? sum_f64(logits.data<double>() + begin, targets.data<double>() + begin,
                      weights.defined() ? weights.data<double>() + begin : nullptr, count)
            : sum_floats(isa_, logits, targets, weights, begin, count);
  });
  Sums all;
  for (const Sums& part : parts) all.loss += part.loss, all.weight += part.weight;
  total.data<double>()[0] = all.loss;
  total.data<double>()[1] = all.weight;
}

void CpuKernels::binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets,
                                               const Tensor& weights, const Tensor& factor,
                                               const Tensor& dx) {
  check_binary_cross_entropy("binary_cross_entropy_backward", logits, targets, weights);
  require_alike("binary_cross_entropy_backward", dx, {&logits});
  require_number("binary_cross_entropy_backward", "the factor", factor);
  const double by = scalar_value(factor);
  in_chunks(device_, dx.numel(), element_grain, [&](Count begin, Count count) {
    if (dx.dtype() == DType::f64) {
      for (Count i = begin; i < begin + count; ++i) {
        const double x = logits.data<double>()[i], e = std::exp(-std::fabs(x));
        const double slope = (x < 0 ? e : 1) / (1 + e) - targets.data<double>()[i];
        dx.data<double>()[i] = by * (weights.defined() ? weights.data<double>()[i] : 1) * slope;
      }
      return;
    }
    const ConvertOps& convert = isa_.convert[storage_index(dx)];
    const ElementwiseOps& ops = isa_.elementwise[storage_f32];
    float values[stack_block], others[stack_block];
    for (Count i = begin; i < begin + count; i += stack_block) {
      const Count n = std::min(stack_block, begin + count - i);
      convert.load(at(logits, i), values, n);
      convert.load(at(targets, i), others, n);
      ops.logistic_slope(values, others, values, n);
      if (weights.defined()) {
        convert.load(at(weights, i), others, n);
        ops.multiply(values, others, values, n);
      }
      ops.scale(values, static_cast<float>(by), values, n);
      convert.store(values, at(dx, i), n);
    }
  });
}

}  // namespace sherd::tensor::cpu
