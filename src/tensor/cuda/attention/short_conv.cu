#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

template <class S>
struct GateArguments {
  using C = Compute<S>;
  const S *x, *a_log, *dt_bias;
  const C* dgates;
  S* dx;
  C *gates, *parts;
  Count rows;
  int heads, repeats;
};

/// log(1 + exp(x))
__device__ inline float softplus(float x) {
  return (x > 0 ? x : 0.0f) + log_of_1_plus(exp_of(-magnitude(x)));
}
__device__ inline double softplus(double x) {
  return (x > 0 ? x : 0.0) + ::log1p(::exp(-::fabs(x)));
}

template <class S>
__global__ void delta_gates_kernel(GateArguments<S> a) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < a.rows * a.heads; i += grid_threads()) {
    const Count row = i / a.heads;
    const int h = static_cast<int>(i % a.heads);
    const Count b = row * 2 * a.heads + h / a.repeats * 2 * a.repeats + h % a.repeats;
    const C step = widen(a.x[b + a.repeats]) + widen(a.dt_bias[h]),
            rate = -exp_anywhere<C>(widen(a.a_log[h]));
    C* gates = a.gates + row * 2 * a.heads + h;
    gates[0] = sigmoid<C>(widen(a.x[b])).value, gates[a.heads] = rate * softplus(step);
  }
}

template <class S>
__global__ void delta_gates_backward_kernel(GateArguments<S> a) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < a.rows * a.heads; i += grid_threads()) {
    const Count row = i / a.heads;
    const int h = static_cast<int>(i % a.heads);
    const Count b = row * 2 * a.heads + h / a.repeats * 2 * a.repeats + h % a.repeats,
                at = row * 2 * a.heads + h;
    const C step = widen(a.x[b + a.repeats]) + widen(a.dt_bias[h]),
            rate = -exp_anywhere<C>(widen(a.a_log[h]));
    const C dstep = a.dgates[at + a.heads] * rate * sigmoid<C>(step).value;
    a.parts[i] = a.dgates[at + a.heads] * rate * softplus(step), a.parts[i + a.rows * a.heads] = dstep;
    a.dx[b] = narrow<S>(a.dgates[at] * sigmoid<C>(widen(a.x[b])).slope);
    a.dx[b + a.repeats] = narrow<S>(dstep);
  }
}

template <class S>
struct ConvArguments {
  using C = Compute<S>;
  const S *x, *weight, *dout;
  S *out, *dx, *states;
  C *dsums, *parts;                     ///< dsums: of all rows; parts: [row parts, columns, taps]
  const std::int32_t *starts, *places;  ///< each may be null
  Count batch, rows, columns, part_rows;
  int taps;

  /// x of the row `back` before row t, and false in `more` from where nothing stands before.
  __device__ C before(Count sequence, Count t, int back, Count c) const {
    if (t >= back) return widen(x[((sequence * rows) + t - back) * columns + c]);
    const std::int32_t* place = places ? places + 3 * sequence : nullptr;
    if (!place || place[1] == 0) return C{0};
    return widen(states[(place[0] * Count{taps - 1} + (taps - 1 + t - back)) * columns + c]);
  }
  __device__ bool begins(Count sequence, Count t) const {
    return (t <= 0 && !places) || (starts && starts[sequence * rows + t] != 0);
  }
  __device__ C sum(Count sequence, Count t, Count c) const {
    C out = 0;
    const S* w = weight + c * taps;
    for (int back = 0; back < taps; ++back) {
      out = fused(widen(w[taps - 1 - back]), before(sequence, t, back, c), out);
      if (begins(sequence, t - back)) break;
    }
    return out;
  }
};

template <class S>
__global__ void short_conv_kernel(ConvArguments<S> a) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < a.batch * a.rows * a.columns; i += grid_threads()) {
    const Count row = i / a.columns, c = i - row * a.columns;
    const C sum = a.sum(row / a.rows, row % a.rows, c);
    a.out[i] = narrow<S>(sum * sigmoid<C>(sum).value);
  }
}

/// The texts' last rows; a thread has one column of a text.
template <class S>
__global__ void conv_states_kernel(ConvArguments<S> a) {
  for (Count i = grid_thread(); i < a.batch * a.columns; i += grid_threads()) {
    const Count sequence = i / a.columns, c = i - sequence * a.columns;
    const std::int32_t* place = a.places + 3 * sequence;
    S* to = a.states + place[0] * Count{a.taps - 1} * a.columns + c;
    // Row j is written before row j + 1 is read, which lies behind it.
    for (int j = 0; j < a.taps - 1; ++j)
      to[j * a.columns] = narrow<S>(a.before(sequence, place[2] - 1, a.taps - 2 - j, c));
  }
}

template <class S>
__global__ void conv_sums_backward_kernel(ConvArguments<S> a) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < a.batch * a.rows * a.columns; i += grid_threads()) {
    const Count row = i / a.columns, c = i - row * a.columns;
    const C sum = a.sum(row / a.rows, row % a.rows, c);
    const SigmoidValue<C> s = sigmoid<C>(sum);
    a.dsums[i] = widen(a.dout[i]) * (s.value + sum * s.slope);
  }
}

template <class S>
__global__ void conv_inputs_backward_kernel(ConvArguments<S> a) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < a.batch * a.rows * a.columns; i += grid_threads()) {
    const Count row = i / a.columns, c = i - row * a.columns, sequence = row / a.rows, t = row % a.rows;
    C sum = 0;
    for (int on = 0; on < a.taps && t + on < a.rows; ++on) {
      if (on > 0 && a.begins(sequence, t + on)) break;
      sum = fused(widen(a.weight[c * a.taps + a.taps - 1 - on]), a.dsums[i + on * a.columns], sum);
    }
    a.dx[i] = narrow<S>(sum);
  }
}

/// Some rows' part of the weights' gradients. A thread has one column of a part.
template <class S>
__global__ void conv_weights_backward_kernel(ConvArguments<S> a, Count parts) {
  using C = Compute<S>;
  for (Count i = grid_thread(); i < parts * a.columns; i += grid_threads()) {
    const Count part = i / a.columns, c = i - part * a.columns, all = a.batch * a.rows;
    C sums[8] = {};
    const Count end = (part + 1) * a.part_rows < all ? (part + 1) * a.part_rows : all;
    for (Count row = part * a.part_rows; row < end; ++row) {
      const Count sequence = row / a.rows, t = row % a.rows;
      bool more = true;
      SHERD_UNROLL
      for (int back = 0; back < 8; ++back) {
        if (!more || back >= a.taps) continue;
        sums[back] = fused(a.before(sequence, t, back, c), a.dsums[row * a.columns + c], sums[back]);
        more = !a.begins(sequence, t - back);
      }
    }
    SHERD_UNROLL
    for (int back = 0; back < 8; ++back)
      if (back < a.taps) a.parts[(part * a.columns + c) * a.taps + a.taps - 1 - back] = sums[back];
  }
}

template <class S>
ConvArguments<S> arguments_of(const ConvExtents& e, const Tensor& x, const Tensor& weight,
                              const Tensor& starts) {
  ConvArguments<S> a{};
  a.x = in<S>(x), a.weight = in<S>(weight), a.starts = in_or_null<std::int32_t>(starts);
  a.batch = e.batch, a.rows = e.rows, a.columns = e.columns, a.taps = static_cast<int>(e.taps);
  return a;
}

template <class S>
GateArguments<S> arguments_of(const GateExtents& e, const Tensor& x, const Tensor& a_log,
                              const Tensor& dt_bias) {
  GateArguments<S> a{};
  a.x = in<S>(x), a.a_log = in<S>(a_log), a.dt_bias = in<S>(dt_bias);
  a.rows = e.rows, a.heads = static_cast<int>(e.heads), a.repeats = static_cast<int>(e.repeats);
  return a;
}

}  // namespace

void CudaKernels::delta_gates(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias, int key_heads,
                              const Tensor& gates) {
  const GateExtents e = check_delta_gates("delta_gates", x, a_log, dt_bias, key_heads, gates);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    GateArguments<S> a = arguments_of<S>(e, x, a_log, dt_bias);
    a.gates = out<Compute<S>>(gates);
    launch(delta_gates_kernel<S>, blocks_for(e.rows * e.heads, element_threads, target_.processors),
           element_threads, 0, target_.stream, a);
  });
}

void CudaKernels::delta_gates_backward(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                                       int key_heads, const Tensor& dgates, const Tensor& dx,
                                       const Tensor& parts) {
  const GateExtents e = check_delta_gates_backward(x, a_log, dt_bias, key_heads, dgates, dx, parts);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    GateArguments<S> a = arguments_of<S>(e, x, a_log, dt_bias);
    a.dgates = in<C>(dgates), a.dx = out<S>(dx), a.parts = out<C>(parts);
    launch(delta_gates_backward_kernel<S>, blocks_for(e.rows * e.heads, element_threads, target_.processors),
           element_threads, 0, target_.stream, a);
  });
}

void CudaKernels::short_conv(const Tensor& x, const Tensor& weight,
                             const std::shared_ptr<const Documents>& documents, const StateStore& store,
                             const Tensor& out) {
  const ConvExtents e = check_short_conv("short_conv", x, weight, documents.get(), store, out);
  if (x.numel() == 0) return;
  const Tensor starts = row_starts(store.states ? nullptr : documents.get(), e.batch * e.rows);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    ConvArguments<S> a = arguments_of<S>(e, x, weight, starts);
    a.out = SHERD_CUDA::out<S>(out);
    if (store.states) a.states = SHERD_CUDA::out<S>(store.states), a.places = in<std::int32_t>(store.places);
    launch(short_conv_kernel<S>, blocks_for(x.numel(), element_threads, target_.processors), element_threads,
           0, target_.stream, a);
    if (store.states && e.taps > 1)
      launch(conv_states_kernel<S>, blocks_for(e.batch * e.columns, element_threads, target_.processors),
             element_threads, 0, target_.stream, a);
  });
}

void CudaKernels::short_conv_backward(const Tensor& x, const Tensor& weight,
                                      const std::shared_ptr<const Documents>& documents, const Tensor& dout,
                                      const Tensor& dx, const Tensor& dweight, bool accumulate) {
  const ConvExtents e = check_short_conv_backward(x, weight, documents.get(), dout, dx, dweight);
  const Count rows = e.batch * e.rows, parts = conv_parts(e);
  const DType compute = compute_type(x.dtype());
  const Tensor dsums = scratch(x.numel(), compute),
               found = scratch(dweight ? parts * weight.numel() : 0, compute);
  const Tensor starts = row_starts(documents.get(), rows);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    ConvArguments<S> a = arguments_of<S>(e, x, weight, starts);
    a.dout = in<S>(dout), a.dsums = out<C>(dsums), a.parts = out<C>(found);
    a.part_rows = (rows + parts - 1) / parts;
    const unsigned blocks = blocks_for(x.numel(), element_threads, target_.processors);
    launch(conv_sums_backward_kernel<S>, blocks, element_threads, 0, target_.stream, a);
    if (dx)
      a.dx = out<S>(dx),
      launch(conv_inputs_backward_kernel<S>, blocks, element_threads, 0, target_.stream, a);
    if (dweight)
      launch(conv_weights_backward_kernel<S>,
             blocks_for(parts * e.columns, element_threads, target_.processors), element_threads, 0,
             target_.stream, a, parts);
  });
  if (dweight)
    sum_axis(found, {.outer = 1, .extent = parts, .inner = weight.numel()}, 1, dweight, accumulate);
}

}  // namespace sherd::tensor::SHERD_CUDA
