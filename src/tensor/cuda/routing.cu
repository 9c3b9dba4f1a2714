#include <algorithm>

#include "tensor/cuda/families.cuh"
#include "tensor/routing_row.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr unsigned token_threads = 128;

template <class C>
__global__ void route_kernel(const C* logits, const C* bias, Routing how, Count tokens, int experts,
                             C* scores, std::int32_t* chosen, C* weights) {
  for (Count t = grid_thread(); t < tokens; t += grid_threads())
    route_row<C>({logits + t * experts, bias, experts, scores + t * experts, chosen + t * how.top_k,
                  weights + t * how.top_k},
                 how);
}

template <class C>
__global__ void route_backward_kernel(RoutingGradientRow<C> first, Routing how, Count tokens) {
  for (Count t = grid_thread(); t < tokens; t += grid_threads()) {
    RoutingGradientRow<C> row = first;
    row.logits += t * row.experts, row.scores += t * row.experts, row.dlogits += t * row.experts;
    row.chosen += t * how.top_k;
    if (row.dweights) row.dweights += t * how.top_k;
    route_row_backward(row, how);
  }
}

/// A block takes tokens, its threads columns.
template <int width, class S>
__global__ void combine_kernel(const S* rows, const std::int32_t* places, const Compute<S>* weights,
                               Count tokens, Count k, Count n, S* to) {
  using C = Compute<S>;
  for (Count t = blockIdx.x; t < tokens; t += gridDim.x)
    for (Count at = Count{threadIdx.x} * width; at < n; at += Count{blockDim.x} * width) {
      C sums[width] = {};
      for (Count j = 0; j < k; ++j) {
        const Count place = places[t * k + j];
        if (place < 0) continue;
        const C weight = weights[t * k + j];
        const Pack<S, width> x = load_pack<width>(rows + place * n + at);
        for (int i = 0; i < width; ++i) sums[i] = sums[i] + weight * widen(x.at[i]);
      }
      Pack<S, width> y;
      for (int i = 0; i < width; ++i) y.at[i] = narrow<S>(sums[i]);
      store_pack(to + t * n + at, y);
    }
}

/// A block takes choices, its threads columns. rows, drows and dweights may be null.
template <int width, class S>
__global__ void combine_backward_kernel(const S* rows, const std::int32_t* places, const Compute<S>* weights,
                                        Count choices, Count k, Count n, const S* dout, S* drows,
                                        Compute<S>* dweights) {
  using C = Compute<S>;
  for (Count c = blockIdx.x; c < choices; c += gridDim.x) {
    const Count place = places[c];
    C sum = 0;
    for (Count at = Count{threadIdx.x} * width; place >= 0 && at < n; at += Count{blockDim.x} * width) {
      const Pack<S, width> dy = load_pack<width>(dout + c / k * n + at);
      if (rows) {
        const Pack<S, width> x = load_pack<width>(rows + place * n + at);
        for (int i = 0; i < width; ++i) sum = sum + widen(dy.at[i]) * widen(x.at[i]);
      }
      if (!drows) continue;
      Pack<S, width> dx;
      for (int i = 0; i < width; ++i) dx.at[i] = narrow<S>(weights[c] * widen(dy.at[i]));
      store_pack(drows + place * n + at, dx);
    }
    if (!dweights) continue;
    sum = block_sum(sum);
    if (threadIdx.x == 0) dweights[c] = sum;
  }
}

unsigned column_threads(Count packs) {
  return packs >= element_threads ? element_threads : static_cast<unsigned>((packs + 31) / 32 * 32);
}

}  // namespace

void CudaKernels::route(const Tensor& logits, const Tensor& bias, const Routing& routing,
                        const Tensor& scores, const Tensor& chosen, const Tensor& weights) {
  const RoutingExtents e = check_routing("route", routing, logits, chosen, weights, scores);
  if (bias) require_vector("route", "the bias", bias, e.experts, logits.dtype());
  if (e.tokens == 0) return;
  with_compute_type(logits.dtype(), [&](auto type) {
    using C = decltype(type);
    launch(route_kernel<C>, blocks_for(e.tokens, token_threads, target_.processors, 32), token_threads, 0,
           target_.stream, in<C>(logits), in_or_null<C>(bias), routing, e.tokens, static_cast<int>(e.experts),
           out<C>(scores), out<std::int32_t>(chosen), out<C>(weights));
  });
}

void CudaKernels::route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                                 const Tensor& chosen, const Tensor& dweights,
                                 const RouterLossGradients& losses, const Tensor& dlogits) {
  const RoutingExtents e = check_route_backward(logits, routing, scores, chosen, dweights, losses, dlogits);
  if (e.tokens == 0) return;
  with_compute_type(logits.dtype(), [&](auto type) {
    using C = decltype(type);
    const RoutingGradientRow<C> first{in<C>(logits),
                                      in<C>(scores),
                                      in<std::int32_t>(chosen),
                                      in_or_null<C>(dweights),
                                      in_or_null<C>(losses.balance),
                                      static_cast<C>(losses.z),
                                      static_cast<int>(e.experts),
                                      out<C>(dlogits)};
    launch(route_backward_kernel<C>, blocks_for(e.tokens, token_threads, target_.processors, 32),
           token_threads, 0, target_.stream, first, routing, e.tokens);
  });
}

void CudaKernels::combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                               const Tensor& out) {
  const Count n = check_combine("combine_rows", rows, places, weights, out);
  const Count tokens = places.shape()[0], k = places.shape()[1];
  if (out.numel() == 0) return;
  with_floating(rows.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int pack = pack_width<S>;
    const bool packs = n % pack == 0 && aligned_for_packs(rows.raw(), out.raw());
    launch(packs ? combine_kernel<pack, S> : combine_kernel<1, S>,
           blocks_for(tokens, 1, target_.processors, 32), column_threads(packs ? n / pack : n), 0,
           target_.stream, in<S>(rows), in<std::int32_t>(places), in<Compute<S>>(weights), tokens, k, n,
           SHERD_CUDA::out<S>(out));
  });
}

void CudaKernels::combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                        const Tensor& dout, const Tensor& drows, const Tensor& dweights) {
  const Count n = check_combine_backward(rows, places, weights, dout, drows, dweights);
  if (dout.numel() == 0) return;
  with_floating(rows.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int pack = pack_width<S>;
    S* to = drows ? out<S>(drows) : nullptr;
    const bool packs = n % pack == 0 && aligned_for_packs(rows.raw(), dout.raw(), to);
    launch(packs ? combine_backward_kernel<pack, S> : combine_backward_kernel<1, S>,
           blocks_for(places.numel(), 1, target_.processors, 32), column_threads(packs ? n / pack : n), 0,
           target_.stream, dweights ? in<S>(rows) : nullptr, in<std::int32_t>(places),
           in<Compute<S>>(weights), places.numel(), places.shape()[1], n, in<S>(dout), to,
           dweights ? out<Compute<S>>(dweights) : nullptr);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
