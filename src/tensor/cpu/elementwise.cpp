#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"
#include "tensor/formats/pruned.h"

namespace sherd::tensor::cpu {
namespace {

// The fp64 forms exist to check gradients numerically; they favour plainness over speed.
constexpr double gelu_a = 0.79788456080286535588;  // √(2/π)
constexpr double gelu_b = 0.044715;

double gelu_tanh_f64(double x) {
  return 0.5 * x * (1 + std::tanh(gelu_a * (x + gelu_b * x * x * x)));
}
double gelu_tanh_slope(double x) {
  const double t = std::tanh(gelu_a * (x + gelu_b * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * gelu_a * (1 + 3 * gelu_b * x * x);
}
double normal_cdf(double x) {
  return 0.5 * std::erfc(-x / std::numbers::sqrt2);
}
double normal_density(double x) {
  return std::exp(-0.5 * x * x) * (0.5 * std::numbers::inv_sqrtpi * std::numbers::sqrt2);
}
double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}
double logistic_slope(double x) {
  const double e = std::exp(-std::fabs(x));
  return e / ((1 + e) * (1 + e));
}

/// out[i] = f(xs[i]...), by the table's loop or, in fp64, by `f64`.
template <class Loop, class Fn, class... In>
void elementwise(const char* name, Device& device, const IsaTable& isa, Loop* ElementwiseOps::*loop,
                 const Fn& f64, const Tensor& out, const In&... xs) {
  require_alike(name, out, {&xs...});
  if (out.dtype() == DType::f64) return map_f64(f64, device, out, xs...);
  const auto op = isa.elementwise[storage_index(out)].*loop;
  in_chunks(device, out.numel(), element_grain,
            [&](Count begin, Count count) { op(at(xs, begin)..., at(out, begin), count); });
}

/// A run of an operand that repeats one element or follows it, as n elements that lie behind each other.
const std::byte* run_of(const Tensor& x, Count first, Count stride, Count n, std::byte* repeated) {
  if (stride != 0) return at(x, first);
  const std::size_t size = size_of(x.dtype());
  for (Count i = 0; i < n; ++i)
    std::memcpy(repeated + static_cast<std::size_t>(i) * size, at(x, first), size);
  return repeated;
}

/// Operands of which one repeats along some axes of out.
template <class Fn>
void broadcast(const char* name, Device& device, const IsaTable& isa, Binary* ElementwiseOps::*loop,
               const Fn& f64, const Tensor& out, const Tensor& a, const Tensor& b) {
  const ArrayLoops loops = check_broadcast(name, a, b, out);
  const bool wide = out.dtype() == DType::f64;
  const auto op = wide ? nullptr : isa.elementwise[storage_index(out)].*loop;
  const Count columns = loops.columns(), step_a = loops.stride(0), step_b = loops.stride(1);
  in_chunks(device, out.numel(), element_grain, [&](Count begin, Count count) {
    std::byte repeated_a[4 * stack_block], repeated_b[4 * stack_block];
    for (Count i = begin, n = 0; i < begin + count; i += n) {
      const Count row = i / columns, column = i % columns;
      n = std::min({columns - column, begin + count - i, stack_block});
      const Count from_a = loops.row_start(row, 0) + column * step_a,
                  from_b = loops.row_start(row, 1) + column * step_b;
      if (!wide) {
        op(run_of(a, from_a, step_a, n, repeated_a), run_of(b, from_b, step_b, n, repeated_b), at(out, i), n);
        continue;
      }
      const double *u = a.data<double>() + from_a, *v = b.data<double>() + from_b;
      for (Count k = 0; k < n; ++k) out.data<double>()[i + k] = f64(u[k * step_a], v[k * step_b]);
    }
  });
}

template <class Fn>
void arithmetic(const char* name, Device& device, const IsaTable& isa, Binary* ElementwiseOps::*loop,
                const Fn& f64, const Tensor& out, const Tensor& a, const Tensor& b) {
  const bool alike = a.defined() && b.defined() && a.shape() == out.shape() && b.shape() == out.shape();
  alike ? elementwise(name, device, isa, loop, f64, out, a, b)
        : broadcast(name, device, isa, loop, f64, out, a, b);
}

}  // namespace

void CpuKernels::add(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("add", device_, isa_, &ElementwiseOps::add, std::plus{}, out, a, b);
}

void CpuKernels::subtract(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("subtract", device_, isa_, &ElementwiseOps::subtract, std::minus{}, out, a, b);
}

void CpuKernels::multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("multiply", device_, isa_, &ElementwiseOps::multiply, std::multiplies{}, out, a, b);
}

void CpuKernels::divide(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("divide", device_, isa_, &ElementwiseOps::divide, std::divides{}, out, a, b);
}

void CpuKernels::scale(const Tensor& x, double factor, const Tensor& out) {
  require_alike("scale", out, {&x});
  if (out.dtype() == DType::f64) return map_f64([=](double u) { return u * factor; }, device_, out, x);
  const auto op = isa_.elementwise[storage_index(out)].scale;
  in_chunks(device_, out.numel(), element_grain, [&](Count begin, Count count) {
    op(at(x, begin), static_cast<float>(factor), at(out, begin), count);
  });
}

void CpuKernels::zero_pruned(const Tensor& weight, const Tensor& x) {
  check_zero_pruned(weight, x);
  with_bits(weight.dtype(), [&](auto weight_bits) {
    with_bits(x.dtype(), [&](auto bits) {
      using W = decltype(weight_bits);
      using B = decltype(bits);
      in_chunks(device_, x.numel(), element_grain, [&](Count begin, Count count) {
        const auto* w = reinterpret_cast<const W*>(at(weight, begin));
        auto* to = reinterpret_cast<B*>(at(x, begin));
        for (Count i = 0; i < count; ++i) to[i] = w[i] == pruned_bits<W> ? B{0} : to[i];
      });
    });
  });
}

void CpuKernels::activation(Activation kind, const Tensor& x, const Tensor& out) {
  const auto run = [&](const char* name, auto loop, const auto& f64) {
    elementwise(name, device_, isa_, loop, f64, out, x);
  };
  switch (kind) {
    case Activation::none:
      return copy(x, out);
    case Activation::gelu_tanh:
      return run("gelu_tanh", &ElementwiseOps::gelu_tanh, gelu_tanh_f64);
    case Activation::gelu_erf:
      return run("gelu_erf", &ElementwiseOps::gelu_erf, [](double u) { return u * normal_cdf(u); });
    case Activation::sigmoid:
      return run("sigmoid", &ElementwiseOps::sigmoid, logistic);
    case Activation::exp:
      return run("exp", &ElementwiseOps::exp, [](double u) { return std::exp(u); });
    case Activation::log:
      return run("log", &ElementwiseOps::log, [](double u) { return std::log(u); });
  }
}

void CpuKernels::activation_backward(Activation kind, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  const auto run = [&](const char* name, auto loop, const auto& slope) {
    elementwise(
        name, device_, isa_, loop, [&](double u, double g) { return g * slope(u); }, dx, x, dy);
  };
  switch (kind) {
    case Activation::none:
      return copy(dy, dx);
    case Activation::gelu_tanh:
      return run("gelu_tanh_backward", &ElementwiseOps::gelu_tanh_backward, gelu_tanh_slope);
    case Activation::gelu_erf:
      return run("gelu_erf_backward", &ElementwiseOps::gelu_erf_backward,
                 [](double u) { return normal_cdf(u) + u * normal_density(u); });
    case Activation::sigmoid:
      return run("sigmoid_backward", &ElementwiseOps::sigmoid_backward, logistic_slope);
    case Activation::exp:
      return run("exp_backward", &ElementwiseOps::exp_backward, [](double u) { return std::exp(u); });
    case Activation::log:
      return elementwise(
          "log_backward", device_, isa_, &ElementwiseOps::log_backward,
          [](double u, double g) { return g / u; }, dx, x, dy);
  }
}

void CpuKernels::tanh(const Tensor& x, const Tensor& out) {
  const auto f64 = [](double u) { return std::tanh(u); };
  elementwise("tanh", device_, isa_, &ElementwiseOps::tanh, f64, out, x);
}

void CpuKernels::tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) {
  const auto f64 = [](double v, double g) { return g * (1 - v * v); };
  elementwise("tanh_backward", device_, isa_, &ElementwiseOps::tanh_backward, f64, dx, y, dy);
}

void CpuKernels::relu(const Tensor& x, const Tensor& out) {
  const auto f64 = [](double u) { return u < 0 ? 0 : u; };
  elementwise("relu", device_, isa_, &ElementwiseOps::relu, f64, out, x);
}

void CpuKernels::relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) {
  const auto f64 = [](double v, double g) { return v > 0 ? g : 0; };
  elementwise("relu_backward", device_, isa_, &ElementwiseOps::relu_backward, f64, dx, y, dy);
}

namespace {

/// A function of a gate, and its slope.
struct GateF64 {
  double value, slope;
};
GateF64 gate_f64(Glu kind, double u) {
  switch (kind) {
    case Glu::swiglu:
      return {u * logistic(u), logistic(u) + u * logistic_slope(u)};
    case Glu::geglu_tanh:
      return {gelu_tanh_f64(u), gelu_tanh_slope(u)};
    case Glu::geglu_erf:
      return {u * normal_cdf(u), normal_cdf(u) + u * normal_density(u)};
    case Glu::swiglu_clamped: {
      const double g = std::min(u, clamped_glu_limit), s = logistic(clamped_glu_alpha * g),
                   bend = clamped_glu_alpha * g * logistic_slope(clamped_glu_alpha * g);
      return {g * s, u > clamped_glu_limit ? 0 : s + bend};
    }
  }
  return {};
}
/// The factor beside the gate, and its slope.
GateF64 up_f64(Glu kind, double u) {
  if (kind != Glu::swiglu_clamped) return {u, 1};
  const double within = std::clamp(u, -clamped_glu_limit, clamped_glu_limit);
  return {within + 1, within == u ? 1.0 : 0.0};
}

}  // namespace

void CpuKernels::glu(Glu kind, const Tensor& x, const Tensor& out) {
  const Count width = require_glu("glu", x, out), rows = out.shape().rows();
  if (out.numel() == 0) return;
  for_items(device_, rows, row_grain(2 * width), [&](Count row) {
    if (x.dtype() != DType::f64) {
      isa_.elementwise[storage_index(x)].glu[static_cast<int>(kind)](
          at(x, 2 * row * width), at(x, (2 * row + 1) * width), at(out, row * width), width);
      return;
    }
    const double* gate = x.data<double>() + 2 * row * width;
    double* y = out.data<double>() + row * width;
    for (Count i = 0; i < width; ++i)
      y[i] = gate_f64(kind, gate[i]).value * up_f64(kind, gate[width + i]).value;
  });
}

void CpuKernels::glu_backward(Glu kind, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  const Count width = require_glu("glu_backward", x, dy), rows = dy.shape().rows();
  require_alike("glu_backward", dx, {&x});
  if (dy.numel() == 0) return;
  for_items(device_, rows, row_grain(2 * width), [&](Count row) {
    const Count gate_at = 2 * row * width, up_at = gate_at + width;
    if (x.dtype() != DType::f64) {
      isa_.elementwise[storage_index(x)].glu_backward[static_cast<int>(kind)](
          at(x, gate_at), at(x, up_at), at(dy, row * width), at(dx, gate_at), at(dx, up_at), width);
      return;
    }
    const double* in = x.data<double>();
    const double* grad = dy.data<double>() + row * width;
    double* to = dx.data<double>();
    for (Count i = 0; i < width; ++i) {
      const GateF64 act = gate_f64(kind, in[gate_at + i]), up = up_f64(kind, in[up_at + i]);
      to[gate_at + i] = grad[i] * up.value * act.slope;
      to[up_at + i] = grad[i] * act.value * up.slope;
    }
  });
}

}  // namespace sherd::tensor::cpu
