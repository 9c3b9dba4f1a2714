#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/extents.h"
#include "tensor/formats/pruned.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

struct Add {
  __device__ auto operator()(auto a, auto b) const { return a + b; }
};
struct Subtract {
  __device__ auto operator()(auto a, auto b) const { return a - b; }
};
struct Divide {
  __device__ auto operator()(auto a, auto b) const { return a / b; }
};
struct Multiply {
  __device__ auto operator()(auto a, auto b) const { return a * b; }
};
template <class C>
struct ScaleOp {
  C factor;
  __device__ C operator()(C x) const { return x * factor; }
};

template <class C>
constexpr C gelu_a = static_cast<C>(0.79788456080286535588);  // √(2/π)
template <class C>
constexpr C gelu_b = static_cast<C>(0.044715);

/// An activation and its slope; what a kernel does not use of it is not computed.
template <class C>
struct GateValue {
  C value, slope;
};
/// The factor beside the gate: up itself.
struct PlainUp {
  template <class C>
  __device__ static GateValue<C> up(C u) {
    return {u, C{1}};
  }
};
template <class S>
struct SiluGate : PlainUp {
  template <class C>
  __device__ GateValue<C> operator()(C u) const {
    const SigmoidValue<C> s = sigmoid<S>(u);
    return {u * s.value, s.value + u * s.slope};
  }
};
// ½(1 + tanh u) is the logistic function of 2u, which keeps the small tail's relative accuracy.
template <class S>
struct GeluTanhGate : PlainUp {
  template <class C>
  __device__ GateValue<C> operator()(C u) const {
    const C square = u * u;
    const SigmoidValue<C> s = sigmoid<S>(C{2} * gelu_a<C> * (u + gelu_b<C> * (square * u)));
    const C inner = C{2} * gelu_a<C> + (C{6} * gelu_a<C> * gelu_b<C>)*square;
    // For large |u| the slope is 0 while inner may overflow to infinity.
    const C bend = s.slope == C{0} ? C{0} : u * s.slope * inner;
    return {u * s.value, s.value + bend};
  }
};
template <class S>
struct GeluErfGate : PlainUp {
  template <class C>
  __device__ GateValue<C> operator()(C u) const {
    const NormalValue<C> d = normal<S>(u);
    return {u * d.cdf, d.cdf + u * d.density};
  }
};
template <class S>
struct SiluClampedGate {
  template <class C>
  __device__ GateValue<C> operator()(C u) const {
    constexpr C limit = clamped_glu_limit, alpha = clamped_glu_alpha;
    const C g = u > limit ? limit : u;
    const SigmoidValue<C> s = sigmoid<S>(alpha * g);
    return {g * s.value, u > limit ? C{0} : s.value + alpha * g * s.slope};
  }
  template <class C>
  __device__ static GateValue<C> up(C u) {
    constexpr C limit = clamped_glu_limit;
    const C low = u < -limit ? -limit : u, within = low > limit ? limit : low;
    return {within + 1, within == u ? C{1} : C{0}};
  }
};
template <class Gate>
struct ValueOf {
  __device__ auto operator()(auto u) const { return Gate{}(u).value; }
};
template <class Gate>
struct SlopeOf {
  __device__ auto operator()(auto u, auto g) const { return g * Gate{}(u).slope; }
};
template <class S>
using GeluTanh = ValueOf<GeluTanhGate<S>>;
template <class S>
using GeluErf = ValueOf<GeluErfGate<S>>;
template <class S>
using GeluTanhBackward = SlopeOf<GeluTanhGate<S>>;
template <class S>
using GeluErfBackward = SlopeOf<GeluErfGate<S>>;
template <class S>
struct SigmoidOf {
  __device__ auto operator()(auto u) const { return sigmoid<S>(u).value; }
};
template <class S>
struct SigmoidBackward {
  __device__ auto operator()(auto u, auto g) const { return g * sigmoid<S>(u).slope; }
};
template <class S>
struct Exp {
  __device__ auto operator()(auto u) const { return exp_anywhere<S>(u); }
};
template <class S>
struct ExpBackward {
  __device__ auto operator()(auto u, auto g) const { return g * exp_anywhere<S>(u); }
};
struct Log {
  __device__ auto operator()(auto u) const { return log_of(u); }
};
struct LogBackward {
  __device__ auto operator()(auto u, auto g) const { return g / u; }
};
struct TanhOp {
  __device__ auto operator()(auto u) const { return tanh_of(u); }
};
struct TanhBackward {
  template <class C>
  __device__ C operator()(C v, C g) const {
    return g * (C{1} - v * v);
  }
};
// A NaN passes through: only numbers below zero are cut.
struct ReluOp {
  template <class C>
  __device__ C operator()(C u) const {
    return u < C{0} ? C{0} : u;
  }
};
struct ReluBackward {
  template <class C>
  __device__ C operator()(C v, C g) const {
    return v > C{0} ? g : C{0};
  }
};

/// y[i] = op(xs[i]...)
template <class Op, class... In>
void elementwise(const char* name, const Target& target, const Op& op, const Tensor& y, const In&... xs) {
  require_alike(name, y, {&xs...});
  with_floating(y.dtype(), [&](auto type) {
    using S = decltype(type);
    map(target, op, y.numel(), out<S>(y), in<S>(xs)...);
  });
}
/// The same by operations that depend on the storage type: Op<S>.
template <template <class> class Op, class... In>
void elementwise(const char* name, const Target& target, const Tensor& y, const In&... xs) {
  require_alike(name, y, {&xs...});
  with_floating(y.dtype(), [&](auto type) {
    using S = decltype(type);
    map(target, Op<S>{}, y.numel(), out<S>(y), in<S>(xs)...);
  });
}

/// y = op(a, b) where an operand repeats along some axes.
template <class Op, class S>
__global__ void broadcast_kernel(Op op, ArrayLoops loops, Count n, const S* a, const S* b, S* y) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    Count rest = i, at_a = 0, at_b = 0;
    for (int axis = loops.rank - 1; axis >= 0; --axis) {
      const Count extent = loops.extents[axis], index = rest % extent;
      at_a += index * loops.strides[0][axis];
      at_b += index * loops.strides[1][axis];
      rest /= extent;
    }
    y[i] = narrow<S>(op(widen(a[at_a]), widen(b[at_b])));
  }
}

template <class Op>
void arithmetic(const char* name, const Target& target, const Op& op, const Tensor& y, const Tensor& a,
                const Tensor& b) {
  if (a.defined() && b.defined() && a.shape() == y.shape() && b.shape() == y.shape())
    return elementwise(name, target, op, y, a, b);
  const ArrayLoops loops = check_broadcast(name, a, b, y);
  if (y.numel() == 0) return;
  with_floating(y.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(broadcast_kernel<Op, S>, blocks_for(y.numel(), element_threads, target.processors, 32),
           element_threads, 0, target.stream, op, loops, y.numel(), in<S>(a), in<S>(b), out<S>(y));
  });
}

template <class W, class B>
__global__ void zero_pruned_kernel(const W* weight, B* x, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads())
    if (weight[i] == pruned_bits<W>) x[i] = 0;
}

/// y[row] = act(gate[row])·up[row], tensor::Glu; a block takes one row after the other.
template <int width, class Act, class S>
__global__ void glu_kernel(Count rows, Count f, const S* x, S* y) {
  using C = Compute<S>;
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const S* gates = x + 2 * row * f;
    for (Count i = Count{threadIdx.x} * width; i < f; i += Count{blockDim.x} * width) {
      const Pack<S, width> gate = load_pack<width>(gates + i), up = load_pack<width>(gates + f + i);
      Pack<S, width> to;
      for (int k = 0; k < width; ++k) {
        const GateValue<C> act = Act{}(widen(gate.at[k]));
        to.at[k] = narrow<S>(act.value * Act::up(C{widen(up.at[k])}).value);
      }
      store_pack(y + row * f + i, to);
    }
  }
}

template <int width, class Act, class S>
__global__ void glu_backward_kernel(Count rows, Count f, const S* x, const S* dy, S* dx) {
  using C = Compute<S>;
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const S* gates = x + 2 * row * f;
    S* to = dx + 2 * row * f;
    for (Count i = Count{threadIdx.x} * width; i < f; i += Count{blockDim.x} * width) {
      const Pack<S, width> gate = load_pack<width>(gates + i), up = load_pack<width>(gates + f + i),
                           grad = load_pack<width>(dy + row * f + i);
      Pack<S, width> to_gate, to_up;
      for (int k = 0; k < width; ++k) {
        const C g = widen(gate.at[k]), d = widen(grad.at[k]);
        const GateValue<C> act = Act{}(g), factor = Act::up(C{widen(up.at[k])});
        to_up.at[k] = narrow<S>(d * act.value * factor.slope);
        to_gate.at[k] = narrow<S>(d * factor.value * act.slope);
      }
      store_pack(to + i, to_gate);
      store_pack(to + f + i, to_up);
    }
  }
}

/// Rows and packs of a row over a grid; whole warps.
struct RowGrid {
  unsigned blocks, threads;
  RowGrid(const Target& target, Count rows, Count packs)
      : blocks(blocks_for(rows, 1, target.processors, 32)),
        threads(packs >= element_threads ? element_threads : static_cast<unsigned>((packs + 31) / 32 * 32)) {}
};

}  // namespace

void CudaKernels::add(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("add", target_, Add{}, out, a, b);
}

void CudaKernels::subtract(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("subtract", target_, Subtract{}, out, a, b);
}

void CudaKernels::divide(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("divide", target_, Divide{}, out, a, b);
}

void CudaKernels::multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  arithmetic("multiply", target_, Multiply{}, out, a, b);
}

void CudaKernels::scale(const Tensor& x, double factor, const Tensor& out) {
  require_alike("scale", out, {&x});
  with_floating(out.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    map(target_, ScaleOp<C>{static_cast<C>(factor)}, out.numel(), SHERD_CUDA::out<S>(out), in<S>(x));
  });
}

void CudaKernels::activation(Activation kind, const Tensor& x, const Tensor& out) {
  switch (kind) {
    case Activation::none:
      return copy(x, out);
    case Activation::gelu_tanh:
      return elementwise<GeluTanh>("gelu_tanh", target_, out, x);
    case Activation::gelu_erf:
      return elementwise<GeluErf>("gelu_erf", target_, out, x);
    case Activation::sigmoid:
      return elementwise<SigmoidOf>("sigmoid", target_, out, x);
    case Activation::exp:
      return elementwise<Exp>("exp", target_, out, x);
    case Activation::log:
      return elementwise("log", target_, Log{}, out, x);
  }
}

void CudaKernels::activation_backward(Activation kind, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  switch (kind) {
    case Activation::none:
      return copy(dy, dx);
    case Activation::gelu_tanh:
      return elementwise<GeluTanhBackward>("gelu_tanh_backward", target_, dx, x, dy);
    case Activation::gelu_erf:
      return elementwise<GeluErfBackward>("gelu_erf_backward", target_, dx, x, dy);
    case Activation::sigmoid:
      return elementwise<SigmoidBackward>("sigmoid_backward", target_, dx, x, dy);
    case Activation::exp:
      return elementwise<ExpBackward>("exp_backward", target_, dx, x, dy);
    case Activation::log:
      return elementwise("log_backward", target_, LogBackward{}, dx, x, dy);
  }
}

void CudaKernels::zero_pruned(const Tensor& weight, const Tensor& x) {
  check_zero_pruned(weight, x);
  if (x.numel() == 0) return;
  with_bits(weight.dtype(), [&](auto weight_bits) {
    with_bits(x.dtype(), [&](auto bits) {
      using W = decltype(weight_bits);
      using B = decltype(bits);
      launch(zero_pruned_kernel<W, B>, blocks_for(x.numel(), element_threads, target_.processors, 32),
             element_threads, 0, target_.stream, reinterpret_cast<const W*>(weight.raw()),
             reinterpret_cast<B*>(x.raw()), x.numel());
    });
  });
}

void CudaKernels::tanh(const Tensor& x, const Tensor& out) {
  elementwise("tanh", target_, TanhOp{}, out, x);
}

void CudaKernels::tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) {
  elementwise("tanh_backward", target_, TanhBackward{}, dx, y, dy);
}

void CudaKernels::relu(const Tensor& x, const Tensor& out) {
  elementwise("relu", target_, ReluOp{}, out, x);
}

void CudaKernels::relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) {
  elementwise("relu_backward", target_, ReluBackward{}, dx, y, dy);
}

void CudaKernels::glu(Glu kind, const Tensor& x, const Tensor& out) {
  const Count f = require_glu("glu", x, out), rows = out.shape().rows();
  if (out.numel() == 0) return;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int width = pack_width<S>;
    const bool packs = f % width == 0 && aligned_for_packs(x.raw(), out.raw());
    const RowGrid grid(target_, rows, packs ? f / width : f);
    const auto run = [&](auto act) {
      using Act = decltype(act);
      launch(packs ? glu_kernel<width, Act, S> : glu_kernel<1, Act, S>, grid.blocks, grid.threads, 0,
             target_.stream, rows, f, in<S>(x), SHERD_CUDA::out<S>(out));
    };
    switch (kind) {
      case Glu::swiglu:
        return run(SiluGate<S>{});
      case Glu::geglu_tanh:
        return run(GeluTanhGate<S>{});
      case Glu::geglu_erf:
        return run(GeluErfGate<S>{});
      case Glu::swiglu_clamped:
        return run(SiluClampedGate<S>{});
    }
  });
}

void CudaKernels::glu_backward(Glu kind, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  const Count f = require_glu("glu_backward", x, dy), rows = dy.shape().rows();
  require_alike("glu_backward", dx, {&x});
  if (dy.numel() == 0) return;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int width = pack_width<S>;
    const bool packs = f % width == 0 && aligned_for_packs(x.raw(), dy.raw(), dx.raw());
    const RowGrid grid(target_, rows, packs ? f / width : f);
    const auto run = [&](auto act) {
      using Act = decltype(act);
      launch(packs ? glu_backward_kernel<width, Act, S> : glu_backward_kernel<1, Act, S>, grid.blocks,
             grid.threads, 0, target_.stream, rows, f, in<S>(x), in<S>(dy), out<S>(dx));
    };
    switch (kind) {
      case Glu::swiglu:
        return run(SiluGate<S>{});
      case Glu::geglu_tanh:
        return run(GeluTanhGate<S>{});
      case Glu::geglu_erf:
        return run(GeluErfGate<S>{});
      case Glu::swiglu_clamped:
        return run(SiluClampedGate<S>{});
    }
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
