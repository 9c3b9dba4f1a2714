#include <algorithm>

#include "tensor/cuda/attention/attention_fragments.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The larger over the four lanes that share rows, and the sum.
template <class Op>
__device__ float fold_pairs(float value, Op op) {
  value = op(value, __shfl_xor_sync(device::SHERD_CUDA::all_lanes, value, 2));
  return op(value, __shfl_xor_sync(device::SHERD_CUDA::all_lanes, value, 1));
}

/// Forward: out and lse of one tile of queries. Values come while scores are formed, and the next keys while
/// values are added up.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(mma_threads, Shape::blocks)
    mma_forward_kernel(AttentionArguments<S> a, Parts parts) {
  constexpr int tile = mma_tile, count = tile / 8;
  SHERD_DYNAMIC_SHARED(S, keys);
  S* values = keys + tile * Shape::row;
  const TileIndex index = parts.find(a, a.heads, tile, a.seen.ahead < a.seq);
  if (index.empty) return;
  const Count numbered = a.first_score_of(index.batch, index.head);
  const int q0 = static_cast<int>(index.first), g = index.head / a.group(), dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  const auto start = [&](int first, Count col, S* to) {
    start_tile<Shape, tile>(rows + first * a.width + col, a.width, a.seq - first, dim, to);
  };
  int k0 = static_cast<int>(a.seen.first(q0)) / tile * tile;
  const int end = static_cast<int>(a.seen.end(q0 + tile - 1, a.seq));
  start(q0, a.query_col(index.head), values);
  start(k0, a.key_col(g), keys);
  finish_copies();
  __syncthreads();
  const FragmentRows<Shape, true, S> queries(values);
  const SeenByRows seen = SeenByRows::keys(a, q0);
  const float scale = a.scale * log2_e;  // positive; powers are of 2
  float top[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, sums[Shape::columns][4];
  clear(sums);
  for (; k0 < end; k0 += tile) {
    __syncthreads();
    start(k0, a.value_col(g), values);
    float scores[count][4];
    dot_rows(queries, keys, 0, scores);
    finish_copies();
    __syncthreads();
    if (k0 + tile < end) start(k0 + tile, a.key_col(g), keys);
    const bool all = seen.all(k0, tile);
    SHERD_UNROLL
    for (int half = 0; half < 2; ++half) {
      float high = top[half];
      SHERD_UNROLL
      for (int i = 0; i < 2 * count; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        if (!all && !seen.has(half, k0 + i / 2 * 8 + 2 * lane_pair() + i % 2)) score = -INFINITY;
        high = score > high ? score : high;
      }
      high = fold_pairs(high, device::SHERD_CUDA::Larger{});
      const float fade = fast_exp2((top[half] - high) * scale), shift = -high * scale;
      top[half] = high;
      float sum = 0;
      SHERD_UNROLL
      for (int i = 0; i < 2 * count; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = fast_exp2(fused(score, scale, shift));
        sum += score;
      }
      total[half] = fused(total[half], fade, sum);
      SHERD_UNROLL
      for (int n = 0; n < Shape::columns; ++n) sums[n][2 * half] *= fade, sums[n][2 * half + 1] *= fade;
    }
    if (a.threshold) {
      SHERD_UNROLL
      for (int n = 0; n < count; ++n) {
        const unsigned kept = kept_by_queries(a, numbered, q0 + warp_row(), k0 + 8 * n);
        SHERD_UNROLL
        for (int i = 0; i < 4; ++i) scores[n][i] = kept >> i & 1u ? scores[n][i] : 0.0f;
      }
    }
    add_rows<Shape>(scores, values, 0, sums);
    finish_copies();
  }
  float times[2];
  SHERD_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float all = fold_pairs(total[half], device::SHERD_CUDA::Plus{});
    times[half] = all == 0.0f ? 0.0f : a.factor / all;
    const int query = q0 + lane_row(half);
    if (lane_pair() == 0 && query < a.seq)
      a.lse[index.number(a, index.head, query)] = top[half] * a.scale + static_cast<float>(::log(all));
  }
  const Count out_row = Count{a.heads} * a.dim;
  store_rows<Shape>(sums, times, a.to + (index.row(a) + q0) * out_row + index.head * a.dim, out_row,
                    a.seq - q0, dim);
}

/// Gradient of one tile of queries. The next keys and values come while these are worked on.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(mma_threads, Shape::blocks)
    mma_dq_kernel(AttentionArguments<S> a, Parts parts) {
  constexpr int tile = Shape::tile, chunk = Shape::chunk, count = chunk / 8, area = tile * Shape::row;
  SHERD_DYNAMIC_SHARED(S, shared);
  const TileIndex index = parts.find(a, a.heads, mma_tile, a.seen.ahead < a.seq);
  if (index.empty) return;
  const Count out_row = Count{a.heads} * a.dim, numbered = a.first_score_of(index.batch, index.head);
  const int q0 = static_cast<int>(index.first), g = index.head / a.group(), dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  const Count own = q0 * a.width + a.query_col(index.head);
  S* staged = shared + mma_tile * Shape::row;
  start_tile<Shape, mma_tile>(rows + own, a.width, a.seq - q0, dim, shared);
  start_tile<Shape, mma_tile>(a.dout + (index.row(a) + q0) * out_row + index.head * a.dim, out_row,
                              a.seq - q0, dim, staged);
  finish_copies();
  __syncthreads();
  const FragmentRows<Shape, true, S> queries(shared), douts(staged);
  __syncthreads();
  float lse[2], delta[2];
  SHERD_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int query = q0 + lane_row(half);
    const Count number = index.number(a, index.head, query);
    lse[half] = query < a.seq ? a.lse[number] * log2_e : 0.0f;
    delta[half] = query < a.seq ? a.delta[number] : 0.0f;
  }
  const SeenByRows seen = SeenByRows::keys(a, q0);
  const float scale = a.scale * log2_e;
  float sums[Shape::columns][4];
  clear(sums);
  const auto start = [&](int first, int turn) {
    const S* from = rows + first * a.width;
    S* to = shared + turn * 2 * area;
    start_tile<Shape, tile>(from + a.key_col(g), a.width, a.seq - first, dim, to);
    start_tile<Shape, tile>(from + a.value_col(g), a.width, a.seq - first, dim, to + area);
  };
  const int end = static_cast<int>(a.seen.end(q0 + mma_tile - 1, a.seq));
  int k0 = static_cast<int>(a.seen.first(q0)) / tile * tile, turn = 0;
  if (k0 < end) start(k0, turn);
  for (; k0 < end; k0 += tile, turn ^= 1) {
    finish_copies();
    __syncthreads();
    if (k0 + tile < end) start(k0 + tile, turn ^ 1);
    const S* keys = shared + turn * 2 * area;
    for (int c = 0; c < tile; c += chunk) {
      const int at = k0 + c;
      if (!seen.any(at, chunk)) continue;
      float scores[count][4], products[count][4];
      dot_rows(queries, keys, c, scores);
      dot_rows(douts, keys + area, c, products);
      const bool all = seen.all(at, chunk);
      SHERD_UNROLL
      for (int n = 0; n < count; ++n) {
        const unsigned kept = a.threshold ? kept_by_queries(a, numbered, q0 + warp_row(), at + 8 * n) : ~0u;
        SHERD_UNROLL
        for (int i = 0; i < 4; ++i) {
          float weight = fast_exp2(fused(scores[n][i], scale, -lse[i / 2]));
          if (!all && !seen.has(i / 2, at + 8 * n + 2 * lane_pair() + i % 2)) weight = 0;
          scores[n][i] = weight * fused(kept >> i & 1u ? products[n][i] : 0.0f, a.factor, -delta[i / 2]);
        }
      }
      add_rows<Shape>(scores, keys, c, sums);
    }
  }
  const float times[2] = {a.scale, a.scale};
  store_rows<Shape>(sums, times, a.dqkv + index.row(a) * a.width + own, a.width, a.seq - q0, dim);
}

/// Gradients of one tile of keys and of its values: the query heads of the group in turn, and their tiles in
/// order, so that the sums have one order. Fragments of scores are transposed: keys in rows.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(mma_threads) mma_dkv_kernel(AttentionArguments<S> a, Parts parts) {
  constexpr int tile = Shape::tile, chunk = Shape::chunk, count = chunk / 8, area = tile * Shape::row;
  SHERD_DYNAMIC_SHARED(S, shared);
  S *tile_keys = shared, *tile_values = tile_keys + mma_tile * Shape::row,
    *tiles = tile_values + mma_tile * Shape::row;
  auto* row_numbers = reinterpret_cast<float*>(tiles + 4 * area);
  const TileIndex index = parts.find(a, a.kv_heads, mma_tile, false);
  if (index.empty) return;
  const Count out_row = Count{a.heads} * a.dim;
  const int k0 = static_cast<int>(index.first), g = index.head, dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  start_tile<Shape, mma_tile>(rows + k0 * a.width + a.key_col(g), a.width, a.seq - k0, dim, tile_keys);
  start_tile<Shape, mma_tile>(rows + k0 * a.width + a.value_col(g), a.width, a.seq - k0, dim, tile_values);
  finish_copies();
  __syncthreads();
  const FragmentRows<Shape, Shape::held, S> keys(tile_keys), values(tile_values);
  const SeenByRows seen = SeenByRows::queries(a, k0);
  const float scale = a.scale * log2_e;
  float dk[Shape::columns][4], dv[Shape::columns][4];
  clear(dk), clear(dv);
  const auto start = [&](int own, int first, int turn) {
    S* to = tiles + turn * 2 * area;
    start_tile<Shape, tile>(rows + first * a.width + a.query_col(own), a.width, a.seq - first, dim, to);
    start_tile<Shape, tile>(a.dout + (index.row(a) + first) * out_row + own * a.dim, out_row, a.seq - first,
                            dim, to + area);
    const int i = static_cast<int>(threadIdx.x);
    if (i < 2 * tile)
      device::SHERD_CUDA::start_copy(row_numbers + turn * 2 * tile + i,
                                     (i < tile ? a.lse : a.delta) + index.number(a, own, first + i % tile),
                                     first + i % tile < a.seq);
  };
  const int begin = static_cast<int>(a.seen.first_query(k0)) / tile * tile,
            end = static_cast<int>(a.seen.end_query(k0 + mma_tile - 1, a.seq));
  int own = g * a.group(), q0 = begin, turn = 0;
  const int behind = begin < end ? own + a.group() : own;  // all heads of the group
  if (own < behind) start(own, q0, turn);
  for (; own < behind; turn ^= 1) {
    const bool same = q0 + tile < end;
    const int next_own = same ? own : own + 1, next_q0 = same ? q0 + tile : begin;
    finish_copies();
    __syncthreads();
    if (next_own < behind) start(next_own, next_q0, turn ^ 1);
    const S* queries = tiles + turn * 2 * area;
    const float* numbers = row_numbers + turn * 2 * tile;
    const Count numbered = a.first_score_of(index.batch, own);
    for (int c = 0; c < tile; c += chunk) {
      const int at = q0 + c;
      if (!seen.any(at, chunk)) continue;
      float scores[count][4], products[count][4];
      dot_rows(keys, queries, c, scores);
      dot_rows(values, queries + area, c, products);
      const bool all = seen.all(at, chunk);
      SHERD_UNROLL
      for (int n = 0; n < count; ++n) {
        const int column = c + 8 * n + 2 * lane_pair();
        const auto lse = load_pack<2>(numbers + column), delta = load_pack<2>(numbers + tile + column);
        const unsigned kept = a.threshold ? kept_by_keys(a, numbered, at + 8 * n, k0 + warp_row()) : ~0u;
        SHERD_UNROLL
        for (int i = 0; i < 4; ++i) {
          const bool keep = (kept >> i & 1u) != 0;
          float weight = fast_exp2(fused(scores[n][i], scale, -lse.at[i % 2] * log2_e));
          if (!all && !seen.has(i / 2, at + 8 * n + 2 * lane_pair() + i % 2)) weight = 0;
          scores[n][i] = keep ? weight : 0.0f;
          products[n][i] = weight * fused(keep ? products[n][i] : 0.0f, a.factor, -delta.at[i % 2]);
        }
      }
      add_rows<Shape>(scores, queries + area, c, dv);
      add_rows<Shape>(products, queries, c, dk);
    }
    own = next_own, q0 = next_q0;
  }
  S* to = a.dqkv + (index.row(a) + k0) * a.width;
  const float of_keys[2] = {a.scale, a.scale}, of_values[2] = {a.factor, a.factor};
  store_rows<Shape>(dk, of_keys, to + a.key_col(g), a.width, a.seq - k0, dim);
  store_rows<Shape>(dv, of_values, to + a.value_col(g), a.width, a.seq - k0, dim);
}

constexpr Count longest_mma_head = 128;

template <class S, class Fn>
auto with_mma_shape(Count dim, const Fn& f) {
  if (dim <= 64) return f(MmaShape<S, 64>{});
  if (dim <= 96) return f(MmaShape<S, 96>{});
  return f(MmaShape<S, longest_mma_head>{});
}

}  // namespace

template <class S>
bool mma_takes(const Target& target, const AttentionArguments<S>& a) {
  if (a.dim % 16 != 0 || a.dim > longest_mma_head || a.seq > 1 << 29 || a.cap > 0 ||
      !aligned_for_packs(a.qkv, a.dout, a.to, a.dqkv))
    return false;
  return with_mma_shape<S>(a.dim, [&](auto shape) {
    const std::size_t needed = a.dout ? std::max(shape.dq_bytes, shape.dkv_bytes) : shape.forward_bytes;
    return needed <= target.shared_per_block;
  });
}

template <class S, class Parts>
void launch_mma(MmaKernel kernel, const Target& target, const AttentionArguments<S>& a, const Parts& parts,
                unsigned blocks) {
  with_mma_shape<S>(a.dim, [&](auto shape) {
    using Shape = decltype(shape);
    const auto run = [&](auto entry, std::size_t bytes) {
      launch(entry, blocks, mma_threads, bytes, target.stream, a, parts);
    };
    switch (kernel) {
      case MmaKernel::forward:
        return run(mma_forward_kernel<Shape, Parts, S>, Shape::forward_bytes);
      case MmaKernel::dq:
        return run(mma_dq_kernel<Shape, Parts, S>, Shape::dq_bytes);
      case MmaKernel::dkv:
        return run(mma_dkv_kernel<Shape, Parts, S>, Shape::dkv_bytes);
    }
  });
}

template bool mma_takes(const Target&, const AttentionArguments<bf16>&);
template bool mma_takes(const Target&, const AttentionArguments<f16>&);
template void launch_mma(MmaKernel, const Target&, const AttentionArguments<bf16>&, const WholeSequences&,
                         unsigned);
template void launch_mma(MmaKernel, const Target&, const AttentionArguments<bf16>&, const DocumentTable&,
                         unsigned);
template void launch_mma(MmaKernel, const Target&, const AttentionArguments<f16>&, const WholeSequences&,
                         unsigned);
template void launch_mma(MmaKernel, const Target&, const AttentionArguments<f16>&, const DocumentTable&,
                         unsigned);

}  // namespace sherd::tensor::SHERD_CUDA
