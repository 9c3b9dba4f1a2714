#include <limits>

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// A block has one key-value head of one sequence; its warps share the keys out, and their lanes the elements
/// of a head.
constexpr unsigned warps = 4;
constexpr int lane_elements = 8;
constexpr Count longest_head = 32 * lane_elements;

template <class S>
struct StoredArguments {
  const S* qkv;
  S *keys, *values, *out;  ///< out may be null
  const std::int32_t* places;
  Count seq, width, heads, kv_heads, dim, capacity, window;
  Compute<S> scale;
};

/// What a warp has found: the softmax over its keys, not divided yet.
template <class C>
struct Partial {
  C top = -std::numeric_limits<C>::infinity();
  C sum = 0;
  C at[lane_elements]{};
};

/// Every fourth of the `count` keys from position `first` on.
template <class S>
__device__ inline Partial<Compute<S>> attend_warp(const StoredArguments<S>& a, const S* query, Count store,
                                                  Count first, Count count) {
  using C = Compute<S>;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Partial<C> part;
  C q[lane_elements];
  SHERD_UNROLL
  for (int k = 0; k < lane_elements; ++k) {
    const Count d = lane + 32 * k;
    q[k] = d < a.dim ? widen(query[d]) : C{0};
  }
  for (Count n = warp; n < count; n += warps) {
    const Count row = store + (first + n) % a.capacity * a.dim;
    C score = 0;
    SHERD_UNROLL
    for (int k = 0; k < lane_elements; ++k) {
      const Count d = lane + 32 * k;
      if (d < a.dim) score += q[k] * widen(a.keys[row + d]);
    }
    score = warp_sum(score) * a.scale;
    const C top = part.top > score ? part.top : score;
    const C keep = exp_for<C>(part.top - top), weight = exp_for<C>(score - top);
    part.top = top;
    part.sum = part.sum * keep + weight;
    SHERD_UNROLL
    for (int k = 0; k < lane_elements; ++k) {
      const Count d = lane + 32 * k;
      if (d < a.dim) part.at[k] = part.at[k] * keep + weight * widen(a.values[row + d]);
    }
  }
  return part;
}

/// One query over all warps' keys. Every thread of the block calls.
template <class S>
__device__ inline void attend_row(const StoredArguments<S>& a, const S* query, Count store, Count first,
                                  Count count, S* to) {
  using C = Compute<S>;
  SHERD_SHARED(C, tops, warps);
  SHERD_SHARED(C, sums, warps);
  SHERD_SHARED(C, parts, warps * longest_head);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Partial<C> mine = attend_warp(a, query, store, first, count);
  if (lane == 0) tops[warp] = mine.top, sums[warp] = mine.sum;
  SHERD_UNROLL
  for (int k = 0; k < lane_elements; ++k) parts[warp * longest_head + lane + 32 * k] = mine.at[k];
  __syncthreads();
  C top = tops[0];
  for (unsigned w = 1; w < warps; ++w) top = tops[w] > top ? tops[w] : top;
  for (Count d = threadIdx.x; d < a.dim; d += blockDim.x) {
    C sum = 0, value = 0;
    for (unsigned w = 0; w < warps; ++w) {
      const C weight = exp_for<C>(tops[w] - top);
      sum += weight * sums[w];
      value += weight * parts[w * longest_head + d];
    }
    to[d] = narrow<S>(value / sum);
  }
  __syncthreads();  // before the next row's keys, and what is shared, come in their place
}

template <class S>
__global__ void attend_stored_kernel(StoredArguments<S> a) {
  const Count b = blockIdx.x / a.kv_heads, g = blockIdx.x % a.kv_heads, group = a.heads / a.kv_heads;
  const Count text = a.places[3 * b], begin = a.places[3 * b + 1], count = a.places[3 * b + 2];
  const Count store = (text * a.kv_heads + g) * a.capacity * a.dim;
  for (Count i = 0; i < a.seq; ++i) {
    const S* queries = a.qkv + (b * a.seq + i) * a.width + g * (group + 2) * a.dim;
    S* to = a.out ? a.out + ((b * a.seq + i) * a.heads + g * group) * a.dim : nullptr;
    if (i >= count) {
      if (to)
        for (Count d = threadIdx.x; d < group * a.dim; d += blockDim.x) to[d] = narrow<S>(Compute<S>{0});
      continue;
    }
    const Count position = begin + i, row = store + position % a.capacity * a.dim;
    for (Count d = threadIdx.x; d < a.dim; d += blockDim.x) {
      a.keys[row + d] = queries[group * a.dim + d];
      a.values[row + d] = queries[(group + 1) * a.dim + d];
    }
    if (!to) continue;
    __syncthreads();
    const Count keys = position + 1 < a.window ? position + 1 : a.window;
    for (Count r = 0; r < group; ++r)
      attend_row(a, queries + r * a.dim, store, position + 1 - keys, keys, to + r * a.dim);
  }
}

}  // namespace

void CudaKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, out);
  require(e.dim <= longest_head, "attend_stored: heads of ", e.dim, " elements are longer than ",
          longest_head);
  if (e.batch == 0 || e.seq == 0) return;
  with_floating(qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    const StoredArguments<S> args{in<S>(qkv),
                                  SHERD_CUDA::out<S>(store.keys),
                                  SHERD_CUDA::out<S>(store.values),
                                  out ? SHERD_CUDA::out<S>(out) : nullptr,
                                  in<std::int32_t>(store.places),
                                  e.seq,
                                  e.width(),
                                  e.heads,
                                  e.kv_heads,
                                  e.dim,
                                  e.capacity,
                                  e.window,
                                  static_cast<Compute<S>>(e.scale)};
    launch(attend_stored_kernel<S>, static_cast<unsigned>(e.batch * e.kv_heads), warps * 32, 0,
           target_.stream, args);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
