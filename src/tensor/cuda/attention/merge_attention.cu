#include <limits>

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

template <class S>
struct MergeArguments {
  using C = Compute<S>;
  const S* part;
  const C* part_lse;
  C *out, *lse;
  Count batch, rows, seq, heads, dim, first;
  bool begin;
};

template <class C>
constexpr C none = -std::numeric_limits<C>::infinity();

/// Where the elements and log-sum-exps of one row of one head lie; `item` counts them as part does.
struct MergeRow {
  Count part, part_lse, out, lse;
};
template <class S>
__device__ inline MergeRow merge_row(const MergeArguments<S>& a, Count item) {
  const Count row = item / a.heads, h = item - row * a.heads;
  const Count b = row / a.rows, r = row - b * a.rows, head = b * a.heads + h;
  return {item * a.dim, head * a.rows + r, ((b * a.seq + a.first + r) * a.heads + h) * a.dim,
          head * a.seq + a.first + r};
}

/// The weights of two softmaxes over different keys in the one over all of them. A part without keys changes
/// nothing, even where there were none before.
template <class C>
struct MergeShares {
  C old, part;
};
template <class C>
__device__ inline MergeShares<C> shares_of(C old, C part) {
  if (part == none<C>) return {C{1}, C{0}};
  const C high = old > part ? old : part, low = old > part ? part : old;
  const C e = exp_for<C>(low - high), inverse = C{1} / (C{1} + e);
  return old > part ? MergeShares<C>{inverse, e * inverse} : MergeShares<C>{e * inverse, inverse};
}

/// Threads of x take `width` elements of a row of one head, threads of y such rows. Leaves lse as it is.
template <int width, class S>
__global__ void merge_rows_kernel(MergeArguments<S> a) {
  using C = Compute<S>;
  for (Count item = Count{blockIdx.x} * blockDim.y + threadIdx.y; item < a.batch * a.rows * a.heads;
       item += Count{gridDim.x} * blockDim.y) {
    const MergeRow row = merge_row(a, item);
    const C more = a.part_lse[row.part_lse];
    const MergeShares<C> shares = shares_of(a.begin ? none<C> : a.lse[row.lse], more);
    const bool empty = more == none<C>;
    if (empty && !a.begin) continue;
    for (Count at = Count{threadIdx.x} * width; at < a.dim; at += Count{blockDim.x} * width) {
      // A part without weight may hold anything.
      Pack<S, width> x{};
      Pack<C, width> sum{};
      if (!empty) x = load_pack<width>(a.part + row.part + at);
      if (shares.old != C{0} && !a.begin) sum = load_pack<width>(a.out + row.out + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) sum.at[k] = sum.at[k] * shares.old + widen(x.at[k]) * shares.part;
      store_pack(a.out + row.out + at, sum);
    }
  }
}

/// The log-sum-exps, when all rows have been merged by the old ones.
template <class S>
__global__ void merge_lse_kernel(MergeArguments<S> a) {
  using C = Compute<S>;
  for (Count item = grid_thread(); item < a.batch * a.rows * a.heads; item += grid_threads()) {
    const MergeRow row = merge_row(a, item);
    const C part = a.part_lse[row.part_lse];
    if (a.begin) {
      a.lse[row.lse] = part;
      continue;
    }
    const C old = a.lse[row.lse];
    if (part == none<C>) continue;
    const C high = old > part ? old : part, low = old > part ? part : old;
    a.lse[row.lse] = high + static_cast<C>(::log1p(::exp(static_cast<double>(low - high))));
  }
}

}  // namespace

void CudaKernels::merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                                  const Tensor& out, const Tensor& lse) {
  const MergeExtents e = check_merge_attention(part, part_lse, first, out, lse);
  if (part.numel() == 0) return;
  with_floating(part.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    const MergeArguments<S> args{in<S>(part),
                                 in<C>(part_lse),
                                 SHERD_CUDA::out<C>(out),
                                 SHERD_CUDA::out<C>(lse),
                                 e.batch,
                                 e.rows,
                                 e.seq,
                                 e.heads,
                                 e.dim,
                                 first,
                                 begin};
    constexpr int width = pack_width<C>;
    const bool packs = e.dim % width == 0 && aligned_for_packs(part.raw(), out.raw());
    const Count packs_per_head = packs ? e.dim / width : e.dim, items = e.batch * e.rows * e.heads;
    unsigned threads = 1;  // of x
    while (threads < 32 && threads < packs_per_head) threads *= 2;
    const unsigned lanes = element_threads / threads;
    launch(packs ? merge_rows_kernel<width, S> : merge_rows_kernel<1, S>,
           blocks_for(items, lanes, target_.processors, 32), dim3(threads, lanes), 0, target_.stream, args);
    launch(merge_lse_kernel<S>, blocks_for(items, element_threads, target_.processors), element_threads, 0,
           target_.stream, args);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
