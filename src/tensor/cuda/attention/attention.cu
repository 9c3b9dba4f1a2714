#include "tensor/cuda/attention/attention.cuh"

#include <bit>
#include <initializer_list>
#include <vector>

#include "tensor/cuda/attention/attention_library.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The largest over the 16 threads that share rows, and the sum.
template <class C, class Op>
__device__ C fold_columns(C value, Op op) {
  for (int distance = attention_side / 2; distance >= 1; distance /= 2)
    value = op(value, __shfl_xor_sync(device::SHERD_CUDA::all_lanes, value, distance));
  return value;
}

/// Where maxima begin: below every score, and far from where differences with it would overflow.
template <class C>
constexpr C very_low = static_cast<C>(-1e30);

/// Forward: out and lse of one tile of queries.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(attention_threads) attention_kernel(AttentionArguments<S> a, Parts parts) {
  using C = Compute<S>;
  constexpr int r = Shape::r, tile = Shape::tile;
  SHERD_DYNAMIC_SHARED(C, shared);
  C *queries = shared, *keys = queries + tile * a.row, *weights = keys + tile * a.row;
  const TileIndex index = parts.find(a, a.heads, tile, a.seen.ahead < a.seq);
  if (index.empty) return;
  const Count q0 = index.first, numbered = a.first_score_of(index.batch, index.head);
  const int ty = thread_row(), tx = thread_column();
  const int g = index.head / a.group(), dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  load_tile<Shape, false>(a, rows + q0 * a.width + a.query_col(index.head), a.width, a.seq - q0, queries);
  C top[r], total[r];
  for (int i = 0; i < r; ++i) top[i] = very_low<C>, total[i] = 0;
  RowSums<Shape, C> sums;
  sums.clear();
  const Count end = a.seen.end(q0 + tile - 1, a.seq);
  for (Count k0 = a.seen.first(q0) / tile * tile; k0 < end; k0 += tile) {
    __syncthreads();
    load_tile<Shape, true>(a, rows + k0 * a.width + a.key_col(g), a.width, a.seq - k0, keys);
    __syncthreads();
    C scores[r][r];
    dot_tiles<Shape>(queries, keys, a.row, dim, scores);
    SHERD_UNROLL
    for (int i = 0; i < r; ++i) {
      const Count query = q0 + ty * r + i, first = k0 + tx * r;
      const SeenRange seen = a.seen_by(query);
      C high = top[i];
      SHERD_UNROLL
      for (int c = 0; c < r; ++c) {
        scores[i][c] = a.score(scores[i][c]);
        if (seen.has(first + c)) high = scores[i][c] > high ? scores[i][c] : high;
      }
      high = fold_columns(high, device::SHERD_CUDA::Larger{});
      C sum = 0;
      SHERD_UNROLL
      for (int c = 0; c < r; ++c) {
        scores[i][c] = seen.has(first + c) ? exp_for<S>(scores[i][c] - high) : C{0};
        sum += scores[i][c];
      }
      const C fade = exp_for<S>(top[i] - high);
      total[i] = total[i] * fade + fold_columns(sum, device::SHERD_CUDA::Plus{});
      top[i] = high;
      if (a.threshold) {
        const unsigned kept = kept_scores<r>(a, numbered, query, first);
        SHERD_UNROLL
        for (int c = 0; c < r; ++c) scores[i][c] = kept >> c & 1u ? scores[i][c] * a.factor : C{0};
      }
      SHERD_UNROLL
      for (int part = 0; part < Shape::parts; ++part) {
        SHERD_UNROLL
        for (int k = 0; k < Shape::vec; ++k) sums.at[i][part][k] *= fade;
      }
    }
    store_scores<Shape>(scores, weights);
    __syncthreads();
    load_tile<Shape, true>(a, rows + k0 * a.width + a.value_col(g), a.width, a.seq - k0, keys);
    __syncthreads();
    sums.add_product(weights, keys, a.row, dim);
  }
  const Count out_row = Count{a.heads} * a.dim;
  sums.store(a.to + (index.row(a) + q0) * out_row + index.head * a.dim, out_row, a.seq - q0, a.dim,
             [&](int i) { return total[i] == C{0} ? C{0} : C{1} / total[i]; });
  SHERD_UNROLL
  for (int i = 0; i < r; ++i)
    if (tx == 0 && q0 + ty * r + i < a.seq)
      a.lse[index.number(a, index.head, q0 + ty * r + i)] = top[i] + static_cast<C>(::log(total[i]));
}

/// delta[b, h, i] = Σ dout·out; a warp per row.
template <class S>
__global__ void attention_delta_kernel(AttentionArguments<S> a) {
  using C = Compute<S>;
  const Count rows = a.batch * a.seq * a.heads, warps = grid_threads() / 32;
  for (Count row = grid_thread() / 32; row < rows; row += warps) {
    C sum = 0;
    for (Count d = threadIdx.x % 32; d < a.dim; d += 32)
      sum = fused(widen(a.dout[row * a.dim + d]), widen(a.out[row * a.dim + d]), sum);
    sum = warp_sum(sum);
    const Count head = row % a.heads, i = row / a.heads % a.seq, b = row / a.heads / a.seq;
    if (threadIdx.x % 32 == 0) a.delta[(b * a.heads + head) * a.seq + i] = sum;
  }
}

/// The gradient of one score, and its weight as the values saw it.
template <class C>
struct ScoreGradient {
  C weight, slope;
};
template <class S, class C = Compute<S>>
__device__ ScoreGradient<C> differentiate(C score, C product, C lse, C delta, bool seen, bool kept,
                                          C factor) {
  const C p = seen ? exp_for<S>(score - lse) : C{0};
  return {kept ? p * factor : C{0}, p * ((kept ? product * factor : C{0}) - delta)};
}

/// Gradient of one tile of queries. Of short heads two blocks share a multiprocessor, by their registers too.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(attention_threads, Shape::parts == 1 ? 2 : 0)
    attention_dq_kernel(AttentionArguments<S> a, Parts parts) {
  using C = Compute<S>;
  constexpr int r = Shape::r, tile = Shape::tile;
  SHERD_DYNAMIC_SHARED(C, shared);
  C *queries = shared, *douts = queries + tile * a.row, *keys = douts + tile * a.row,
    *slopes = keys + tile * a.row;
  const TileIndex index = parts.find(a, a.heads, tile, a.seen.ahead < a.seq);
  if (index.empty) return;
  const Count q0 = index.first, out_row = Count{a.heads} * a.dim;
  const Count numbered = a.first_score_of(index.batch, index.head);
  const int ty = thread_row(), tx = thread_column();
  const int g = index.head / a.group(), dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  const Count own = q0 * a.width + a.query_col(index.head);
  load_tile<Shape, false>(a, rows + own, a.width, a.seq - q0, queries);
  load_tile<Shape, false>(a, a.dout + (index.row(a) + q0) * out_row + index.head * a.dim, out_row, a.seq - q0,
                          douts);
  C lse[r], delta[r];
  for (int i = 0; i < r; ++i) {
    const Count query = q0 + ty * r + i;
    lse[i] = query < a.seq ? a.lse[index.number(a, index.head, query)] : C{0};
    delta[i] = query < a.seq ? a.delta[index.number(a, index.head, query)] : C{0};
  }
  RowSums<Shape, C> sums;
  sums.clear();
  const Count end = a.seen.end(q0 + tile - 1, a.seq);
  for (Count k0 = a.seen.first(q0) / tile * tile; k0 < end; k0 += tile) {
    const S* tile_rows = rows + k0 * a.width;
    C scores[r][r], products[r][r];
    __syncthreads();
    load_tile<Shape, true>(a, tile_rows + a.value_col(g), a.width, a.seq - k0, keys);
    __syncthreads();
    dot_tiles<Shape>(douts, keys, a.row, dim, products);
    __syncthreads();
    load_tile<Shape, true>(a, tile_rows + a.key_col(g), a.width, a.seq - k0, keys);
    __syncthreads();
    dot_tiles<Shape>(queries, keys, a.row, dim, scores);
    SHERD_UNROLL
    for (int i = 0; i < r; ++i) {
      const Count query = q0 + ty * r + i, first = k0 + tx * r;
      const SeenRange seen = a.seen_by(query);
      const unsigned kept = a.threshold ? kept_scores<r>(a, numbered, query, first) : ~0u;
      SHERD_UNROLL
      for (int c = 0; c < r; ++c) {
        const C score = a.score(scores[i][c]);
        scores[i][c] = a.slope(score) * differentiate<S>(score, products[i][c], lse[i], delta[i],
                                                         seen.has(first + c), (kept >> c & 1u) != 0, a.factor)
                                            .slope;
      }
    }
    store_scores<Shape>(scores, slopes);
    __syncthreads();
    sums.add_product(slopes, keys, a.row, dim);
  }
  sums.store(a.dqkv + index.row(a) * a.width + own, a.width, a.seq - q0, a.dim, [&](int) { return a.scale; });
}

/// Gradients of one tile of keys and of its values: the query heads of the group in turn, and their tiles in
/// order, so that the sums have one order. Tiles of scores are transposed: keys in rows.
template <class Shape, class Parts, class S>
__global__ void __launch_bounds__(attention_threads)
    attention_dkv_kernel(AttentionArguments<S> a, Parts parts) {
  using C = Compute<S>;
  constexpr int r = Shape::r, tile = Shape::tile;
  SHERD_DYNAMIC_SHARED(C, shared);
  C *keys = shared, *values = keys + tile * a.row, *queries = values + tile * a.row,
    *weights = queries + tile * a.row;
  const TileIndex index = parts.find(a, a.kv_heads, tile, false);
  if (index.empty) return;
  const Count k0 = index.first, out_row = Count{a.heads} * a.dim;
  const int ty = thread_row(), tx = thread_column();
  const int g = index.head, dim = static_cast<int>(a.dim);
  const S* rows = a.qkv + index.row(a) * a.width;
  load_tile<Shape, false>(a, rows + k0 * a.width + a.key_col(g), a.width, a.seq - k0, keys);
  load_tile<Shape, false>(a, rows + k0 * a.width + a.value_col(g), a.width, a.seq - k0, values);
  const Count end = a.seen.end_query(k0 + tile - 1, a.seq);
  RowSums<Shape, C> dk, dv;
  dk.clear(), dv.clear();
  for (int own = g * a.group(); own < (g + 1) * a.group(); ++own) {
    const Count numbers = index.number(a, own, 0), numbered = a.first_score_of(index.batch, own);
    for (Count q0 = a.seen.first_query(k0) / tile * tile; q0 < end; q0 += tile) {
      const S* query_rows = rows + q0 * a.width + a.query_col(own);
      C scores[r][r], products[r][r];
      __syncthreads();
      load_tile<Shape, true>(a, query_rows, a.width, a.seq - q0, queries);
      __syncthreads();
      dot_tiles<Shape>(keys, queries, a.row, dim, scores);
      __syncthreads();
      load_tile<Shape, true>(a, a.dout + (index.row(a) + q0) * out_row + own * a.dim, out_row, a.seq - q0,
                             queries);
      __syncthreads();
      dot_tiles<Shape>(values, queries, a.row, dim, products);
      SHERD_UNROLL
      for (int c = 0; c < r; ++c) {
        const Count query = q0 + tx * r + c, first = k0 + ty * r;
        const SeenRange seen = a.seen_by(query);
        const C lse = query < a.seq ? a.lse[numbers + query] : C{0};
        const C delta = query < a.seq ? a.delta[numbers + query] : C{0};
        const unsigned kept = a.threshold ? kept_scores<r>(a, numbered, query, first) : ~0u;
        SHERD_UNROLL
        for (int i = 0; i < r; ++i) {
          const C score = a.score(scores[i][c]);
          const ScoreGradient<C> made = differentiate<S>(
              score, products[i][c], lse, delta, seen.has(first + i), (kept >> i & 1u) != 0, a.factor);
          scores[i][c] = made.weight, products[i][c] = made.slope * a.slope(score);
        }
      }
      store_scores<Shape>(scores, weights);
      __syncthreads();
      dv.add_product(weights, queries, a.row, dim);
      __syncthreads();
      store_scores<Shape>(products, weights);
      load_tile<Shape, true>(a, query_rows, a.width, a.seq - q0, queries);
      __syncthreads();
      dk.add_product(weights, queries, a.row, dim);
    }
  }
  S* to = a.dqkv + (index.row(a) + k0) * a.width;
  dk.store(to + a.key_col(g), a.width, a.seq - k0, a.dim, [&](int) { return a.scale; });
  dv.store(to + a.value_col(g), a.width, a.seq - k0, a.dim, [](int) { return C{1}; });
}

constexpr int longest_head = 256;

template <class S>
AttentionArguments<S> arguments(const AttentionCall& call) {
  using C = Compute<S>;
  const AttentionExtents& e = call.extents;
  require(e.dim <= longest_head, "attention: heads of ", e.dim, " elements are longer than ", longest_head);
  constexpr int vec = pack_width<C>;
  AttentionArguments<S> a{};
  a.qkv = in<S>(call.qkv), a.out = in<S>(call.out), a.to = out<S>(call.out), a.lse = out<C>(call.lse);
  if (call.dout) a.dout = in<S>(call.dout), a.dqkv = out<S>(call.dqkv);
  a.batch = e.batch, a.seq = a.step = e.seq, a.dim = e.dim, a.width = e.width();
  a.heads = static_cast<int>(e.heads), a.kv_heads = static_cast<int>(e.kv_heads);
  a.row = (static_cast<int>(e.dim) + vec - 1) / vec * vec + vec;
  a.scale = static_cast<C>(e.scale), a.cap = static_cast<C>(e.cap), a.seen = e.seen;
  // Four elements are read as one access, of 32 bytes in fp64: the device splits it.
  a.packs = e.dim % 4 == 0 && aligned_for_packs(call.qkv.raw(), call.dout ? call.dout.raw() : nullptr) &&
            sizeof(S) <= 4;
  a.factor = 1;
  if (call.geometry.dropout > 0) {
    a.threshold = keep_threshold("attention", call.geometry.dropout);
    a.factor = C{1} / (C{1} - static_cast<C>(call.geometry.dropout));
    a.key = call.geometry.key;
    a.score_heads = e.score_heads, a.score_seq = e.score_seq, a.first_score = e.first_score;
  }
  return a;
}

/// Bytes of shared memory: `tiles` of rows and one of scores.
template <class Shape, class S>
std::size_t shared_bytes(const AttentionArguments<S>& a, int tiles) {
  return static_cast<std::size_t>(tiles * Shape::tile * a.row + Shape::tile * Shape::score_row) *
         sizeof(Compute<S>);
}

unsigned grid_of(Count blocks) {
  require(blocks <= 0x7fffffff, "attention: ", blocks, " tiles are more than a grid holds");
  return static_cast<unsigned>(blocks);
}

/// As many, or up to a quarter more, of which there are few for one shape: calls whose documents are about as
/// many take one grid, and work that is a graph stays one.
constexpr Count steady(Count tiles) {
  const auto step = static_cast<Count>(std::bit_floor(static_cast<std::uint64_t>(tiles)) / 4);
  return step > 1 ? (tiles + step - 1) / step * step : tiles;
}

/// Calls launch(parts, blocks) for the grids that together have each tile of each part of a call for each of
/// `heads`: one, but where there are more documents than a table holds.
template <class Launch>
void over_tiles(const AttentionCall& call, Count heads, int tile, const Launch& launch) {
  const AttentionExtents& e = call.extents;
  const auto tiles_of = [&](Count rows) { return (rows + tile - 1) / tile; };
  if (!call.geometry.documents) return launch(WholeSequences{}, grid_of(tiles_of(e.seq) * e.batch * heads));
  require(e.batch * e.seq <= 0x7fffffff, "attention: documents of ", e.batch * e.seq, " rows in one call");
  const std::vector<AttentionPart> parts = attention_parts(e, call.geometry);
  for (std::size_t first = 0; first < parts.size(); first += DocumentTable::most) {
    DocumentTable table;
    for (std::size_t i = first; i < parts.size() && table.count < DocumentTable::most; ++i, ++table.count) {
      table.row[table.count] = static_cast<int>(parts[i].row);
      table.seq[table.count] = static_cast<int>(parts[i].seq);
      table.tile[table.count] = table.tiles;
      table.tiles += static_cast<int>(tiles_of(parts[i].seq));
    }
    launch(table, grid_of(steady(table.tiles) * heads));
  }
}

/// Calls f with the first shape for heads of up to `most_dim` elements, of `rows` per thread, half as many
/// and so on to `least`, whose `tiles` of rows fit into the shared memory of this GPU's blocks: 163 KiB on an
/// A100, 227 on Hopper, 99 on the smaller cards of either time.
template <int most_dim, int rows, int least, class S, class Fn>
void with_rows(const Target& target, const AttentionArguments<S>& a, int tiles, const Fn& f) {
  using Shape = AttentionShape<Compute<S>, most_dim, rows>;
  const std::size_t needed = shared_bytes<Shape>(a, tiles);
  if (needed <= target.shared_per_block) return f(Shape{});
  if constexpr (rows > least)
    with_rows<most_dim, rows / 2, least>(target, a, tiles, f);
  else
    fail(ErrorKind::config, "attention: heads of ", a.dim, " elements of ", name_of(dtype_of<S>()), " take ",
         needed, " bytes of shared memory per block, and this GPU has ", target.shared_per_block,
         ": shorten the heads (model.num_heads), or take a GPU with more");
}

/// The most rows per thread that registers let in.
template <class S>
constexpr int most_rows = sizeof(Compute<S>) == 4 ? 4 : 2;

/// Runs these kernels by tensor cores, one after the other, where those take the call; else returns false.
template <class S>
bool run_mma(const Target& target, const AttentionCall& call, const AttentionArguments<S>& a,
             std::initializer_list<MmaKernel> kernels) {
  if constexpr (rounds_to_16<S>) {
    if (mma_takes(target, a)) {
      for (const MmaKernel kernel : kernels)
        over_tiles(call, kernel == MmaKernel::dkv ? a.kv_heads : a.heads, mma_tile,
                   [&](const auto& parts, unsigned blocks) { launch_mma(kernel, target, a, parts, blocks); });
      return true;
    }
  }
  return false;
}

template <class S>
void run_forward(const Target& target, const AttentionCall& call, const AttentionArguments<S>& a) {
  if (run_mma(target, call, a, {MmaKernel::forward})) return;
  constexpr int tiles = 2, rows = most_rows<S>;
  const auto run = [&](auto shape) {
    using Shape = decltype(shape);
    over_tiles(call, a.heads, Shape::tile, [&](const auto& parts, unsigned blocks) {
      launch(attention_kernel<Shape, std::decay_t<decltype(parts)>, S>, blocks, attention_threads,
             shared_bytes<Shape>(a, tiles), target.stream, a, parts);
    });
  };
  if (a.dim <= 64)
    with_rows<64, rows, rows>(target, a, tiles, run);
  else if (a.dim <= 128)
    with_rows<128, rows, rows>(target, a, tiles, run);
  else
    with_rows<longest_head, rows, rows / 2>(target, a, tiles, run);
}

template <class S>
void run_backward(const Target& target, const AttentionCall& call, const AttentionArguments<S>& a) {
  if (run_mma(target, call, a, {MmaKernel::dq, MmaKernel::dkv})) return;
  constexpr int tiles = 3, rows = most_rows<S>;
  const auto run = [&](auto shape) {
    using Shape = decltype(shape);
    const std::size_t shared = shared_bytes<Shape>(a, tiles);
    over_tiles(call, a.heads, Shape::tile, [&](const auto& parts, unsigned blocks) {
      launch(attention_dq_kernel<Shape, std::decay_t<decltype(parts)>, S>, blocks, attention_threads, shared,
             target.stream, a, parts);
    });
    over_tiles(call, a.kv_heads, Shape::tile, [&](const auto& parts, unsigned blocks) {
      launch(attention_dkv_kernel<Shape, std::decay_t<decltype(parts)>, S>, blocks, attention_threads, shared,
             target.stream, a, parts);
    });
  };
  if (a.dim <= 64)
    with_rows<64, rows, rows>(target, a, tiles, run);
  else if (a.dim <= 128)
    with_rows<128, rows, rows / 2>(target, a, tiles, run);
  else
    with_rows<longest_head, rows / 2, 1>(target, a, tiles, run);
}

void own_forward(const Target& target, const AttentionCall& call) {
  with_floating(call.qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    run_forward<S>(target, call, arguments<S>(call));
  });
}

void own_backward(const Target& target, const AttentionCall& call) {
  const AttentionExtents& e = call.extents;
  const Tensor delta = Tensor::empty(target.device, {e.batch, e.heads, e.seq}, compute_type(call.qkv.dtype()),
                                     Category::workspace);
  with_floating(call.qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    AttentionArguments<S> a = arguments<S>(call);
    a.delta = out<Compute<S>>(delta);
    launch(attention_delta_kernel<S>,
           blocks_for(e.batch * e.seq * e.heads, attention_threads / 32, target.processors),
           attention_threads, 0, target.stream, a);
    run_backward<S>(target, call, a);
  });
}

}  // namespace

void CudaKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                            const Tensor& lse) {
  const AttentionExtents e = check_attention("attention", qkv, geometry, out, lse);
  if (qkv.numel() == 0) return;
  if (!attention_library_) attention_library_ = make_attention_library(target_);
  const AttentionCall call{e, geometry, qkv, out, lse};
  const bool by_library = attention_library_->forward(call);
  ++(by_library ? routes_.by_library : routes_.by_own);
  if (!by_library) own_forward(target_, call);
}

void CudaKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                     const Tensor& lse, const Tensor& dout, const Tensor& dqkv) {
  const AttentionExtents e =
      check_attention_backward("attention_backward", qkv, geometry, out, lse, dout, dqkv);
  if (qkv.numel() == 0) return;
  if (!attention_library_) attention_library_ = make_attention_library(target_);
  const AttentionCall call{e, geometry, qkv, out, lse, dout, dqkv};
  const bool by_library = attention_library_->backward(call, options.deterministic_attention);
  ++(by_library ? routes_.by_library : routes_.by_own);
  if (!by_library) own_backward(target_, call);
}

}  // namespace sherd::tensor::SHERD_CUDA
