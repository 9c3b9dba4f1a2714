#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr int sink_threads = 256;

template <class S>
struct SinkArguments {
  using C = Compute<S>;
  const S *sinks, *dout;
  S* out;
  C *lse, *parts;               ///< parts: [head, part] of the gradient
  Count rows, seq, heads, dim;  ///< rows of all sequences, and of each
  int count;                    ///< parts of a head

  /// Where lse has the number of a row of one head.
  __device__ Count lse_of(Count row, Count head) const {
    return (row / seq * heads + head) * seq + row % seq;
  }
};

/// Threads of y take rows of one head, threads of x their elements. Leaves lse as it is.
template <class S>
__global__ void weigh_rows_kernel(SinkArguments<S> a) {
  using C = Compute<S>;
  for (Count item = Count{blockIdx.x} * blockDim.y + threadIdx.y; item < a.rows * a.heads;
       item += Count{gridDim.x} * blockDim.y) {
    const Count row = item / a.heads, h = item - row * a.heads;
    // The share of all keys but the sink, of a log-sum-exp of -inf 0.
    const C share = C{1} / (C{1} + exp_anywhere<C>(widen(a.sinks[h]) - a.lse[a.lse_of(row, h)]));
    for (Count d = threadIdx.x; d < a.dim; d += blockDim.x) {
      S& value = a.out[item * a.dim + d];
      value = narrow<S>(widen(value) * share);
    }
  }
}

/// The log-sum-exps, when all rows have been weighed by the old ones.
template <class S>
__global__ void sink_lse_kernel(SinkArguments<S> a) {
  using C = Compute<S>;
  for (Count item = grid_thread(); item < a.rows * a.heads; item += grid_threads()) {
    const Count row = item / a.heads, h = item - row * a.heads;
    C& lse = a.lse[a.lse_of(row, h)];
    const C sink = widen(a.sinks[h]), high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
    lse = high + static_cast<C>(::log1p(::exp(static_cast<double>(low - high))));
  }
}

/// Part blockIdx.y of the gradient of sink blockIdx.x: every count-th row of a warp's, a warp for each.
template <class S>
__global__ void __launch_bounds__(sink_threads) sink_gradient_kernel(SinkArguments<S> a) {
  using C = Compute<S>;
  constexpr int warps = sink_threads / 32;
  const Count h = blockIdx.x, lane = threadIdx.x % 32;
  const C sink = widen(a.sinks[h]);
  C sum = 0;
  for (Count row = Count{blockIdx.y} * warps + threadIdx.x / 32; row < a.rows;
       row += Count{a.count} * warps) {
    const Count first = (row * a.heads + h) * a.dim;
    C product = 0;
    for (Count d = lane; d < a.dim; d += 32)
      product = fused(widen(a.dout[first + d]), widen(a.out[first + d]), product);
    product = warp_sum(product);
    if (lane == 0) sum -= exp_for<C>(sink - a.lse[a.lse_of(row, h)]) * product;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.parts[h * a.count + blockIdx.y] = sum;
}

template <class S>
void set_extents(SinkArguments<S>& a, const SinkExtents& e) {
  a.rows = e.batch * e.rows, a.seq = e.rows, a.heads = e.heads, a.dim = e.dim;
}

}  // namespace

void CudaKernels::attention_sinks(const Tensor& sinks, const Tensor& out, const Tensor& lse) {
  const SinkExtents e = check_attention_sinks("attention_sinks", sinks, out, lse);
  if (lse.numel() == 0) return;
  with_floating(out.dtype(), [&](auto type) {
    using S = decltype(type);
    SinkArguments<S> a{};
    a.sinks = in<S>(sinks), a.out = SHERD_CUDA::out<S>(out), a.lse = SHERD_CUDA::out<Compute<S>>(lse);
    set_extents(a, e);
    unsigned threads = 1;  // of x
    while (threads < 32 && threads < e.dim) threads *= 2;
    const unsigned rows = element_threads / threads;
    const Count items = e.batch * e.rows * e.heads;
    launch(weigh_rows_kernel<S>, blocks_for(items, rows, target_.processors, 32), dim3(threads, rows), 0,
           target_.stream, a);
    launch(sink_lse_kernel<S>, blocks_for(items, element_threads, target_.processors), element_threads, 0,
           target_.stream, a);
  });
}

void CudaKernels::attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                           const Tensor& dout, const Tensor& dsinks, bool accumulate) {
  const SinkExtents e = check_attention_sinks_backward(sinks, out, lse, dout, dsinks);
  const Count count = sink_parts(e);
  const Tensor parts = scratch(e.heads * count, compute_type(out.dtype()));
  with_floating(out.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    SinkArguments<S> a{};
    a.sinks = in<S>(sinks), a.dout = in<S>(dout), a.out = const_cast<S*>(in<S>(out));
    a.lse = const_cast<C*>(in<C>(lse)), a.parts = SHERD_CUDA::out<C>(parts);
    set_extents(a, e), a.count = static_cast<int>(count);
    launch(sink_gradient_kernel<S>, dim3(static_cast<unsigned>(e.heads), static_cast<unsigned>(count)),
           sink_threads, 0, target_.stream, a);
  });
  sum_axis(parts, {.outer = e.heads, .extent = count, .inner = 1}, 1, dsinks, accumulate);
}

}  // namespace sherd::tensor::SHERD_CUDA
