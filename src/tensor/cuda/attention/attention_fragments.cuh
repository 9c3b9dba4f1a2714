#pragma once

#include "device/cuda/tensor_cores.cuh"
#include "tensor/cuda/attention/attention.cuh"

// The parts of attention's kernels by tensor cores (FlashAttention-2, Dao 2023), for 16-bit dtypes. A block
// has four warps; each owns 16 rows of a tile of 64, and goes through tiles of other rows in shared memory.
// Its products are fragments of 16 x 8 numbers, of which lane 4·g + t has columns 2·t and 2·t + 1 of the rows
// g and g + 8: number 2·half + e.

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::finish_copies;
using device::SHERD_CUDA::load_matrices;
using device::SHERD_CUDA::mma_16x8x16;
using device::SHERD_CUDA::narrow_pair;

inline constexpr int mma_threads = 128;

/// Sizes for heads of up to `most_dim` elements of S; shorter ones have zeros behind them.
template <class S, int most_dim>
struct MmaShape {
  static constexpr int dim = most_dim, steps = dim / 16, columns = dim / 8;
  static constexpr int row = dim + 8;  ///< from row to row in shared memory: eight of them meet all banks
  static constexpr int tile = dim <= 64 ? 64 : 32;   ///< rows of the tiles that a gradient goes through
  static constexpr int chunk = dim <= 64 ? 32 : 16;  ///< rows at a time whose scores fit registers
  /// Blocks with one sum that a processor has registers for.
  static constexpr int blocks = dim <= 64 ? 3 : 2;
  static constexpr bool held = dim <= 64;  ///< a gradient of keys has registers for keys and values

  static constexpr std::size_t forward_bytes = 2 * mma_tile * row * sizeof(S);
  static constexpr std::size_t dq_bytes = 4 * tile * row * sizeof(S);
  static constexpr std::size_t dkv_bytes =
      (2 * mma_tile + 4 * tile) * row * sizeof(S) + 4 * tile * sizeof(float);
};

__device__ inline int lane_group() {
  return static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ inline int lane_pair() {
  return static_cast<int>(threadIdx.x) % 4;
}
/// The first of a warp's rows in the tile of its block, and a lane's own ones.
__device__ inline int warp_row() {
  return static_cast<int>(threadIdx.x) / 32 * 16;
}
__device__ inline int lane_row(int half) {
  return warp_row() + lane_group() + 8 * half;
}

/// Starts to bring `rows` rows of a matrix, `stride` apart, to shared memory; zeros in the columns behind dim
/// and in the rows behind `count`.
template <class Shape, int rows, class S>
__device__ void start_tile(const S* from, Count stride, Count count, int dim, S* to) {
  constexpr int width = pack_width<S>, packs = Shape::dim / width, step = mma_threads / packs;
  const int first = static_cast<int>(threadIdx.x) / packs, d = static_cast<int>(threadIdx.x) % packs * width;
  const int there = d < dim ? static_cast<int>(count < rows ? count : rows) : 0;
  from += first * stride + d, to += first * Shape::row + d;
  for (int j = 0; j < rows; j += step, from += step * stride, to += step * Shape::row)
    if ((step * packs == mma_threads || first < step) && (rows % step == 0 || first + j < rows))
      device::SHERD_CUDA::start_copy(reinterpret_cast<Pack<S, width>*>(to),
                                     reinterpret_cast<const Pack<S, width>*>(from), first + j < there);
}

/// A warp's 16 rows of a tile as left operands, `steps` of 16 columns: in registers, or read each time anew.
template <class Shape, bool held, class S>
class FragmentRows {
 public:
  __device__ explicit FragmentRows(const S* tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    from_ = tile + (warp_row() + lane % 16) * Shape::row + lane / 16 * 8;
    if constexpr (held) {
      SHERD_UNROLL
      for (int step = 0; step < Shape::steps; ++step) load_matrices<false>(at_[step], from_ + 16 * step);
    }
  }
  __device__ void read(unsigned (&to)[4], int step) const {
    if constexpr (held) {
      SHERD_UNROLL
      for (int i = 0; i < 4; ++i) to[i] = at_[step][i];
    } else {
      load_matrices<false>(to, from_ + 16 * step);
    }
  }

 private:
  unsigned at_[held ? Shape::steps : 1][4];
  const S* from_;
};

/// scores[n] = the warp's rows times rows first + 8·n … first + 8·n + 7 of a tile.
template <class Shape, int count, bool held, class S>
__device__ void dot_rows(const FragmentRows<Shape, held, S>& left, const S* tile, int first,
                         float (&scores)[count][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const S* from = tile + (first + lane / 16 * 8 + lane % 8) * Shape::row + lane / 8 % 2 * 8;
  SHERD_UNROLL
  for (int n = 0; n < count; ++n) {
    SHERD_UNROLL
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
  }
  SHERD_UNROLL
  for (int step = 0; step < Shape::steps; ++step) {
    unsigned a[4], b[4];
    left.read(a, step);
    SHERD_UNROLL
    for (int n = 0; n < count; n += 2) {
      load_matrices<false>(b, from + 8 * n * Shape::row + 16 * step);
      mma_16x8x16(scores[n], a, {b[0], b[1]}, S{});
      mma_16x8x16(scores[n + 1], a, {b[2], b[3]}, S{});
    }
  }
}

/// sums += weights[16, 8·count]·(rows first … first + 8·count - 1 of a tile), the weights rounded to S.
template <class Shape, int count, class S>
__device__ void add_rows(const float (&weights)[count][4], const S* tile, int first,
                         float (&sums)[Shape::columns][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const S* from = tile + (first + lane % 16) * Shape::row + lane / 16 * 8;
  SHERD_UNROLL
  for (int m = 0; m < count; m += 2) {
    unsigned a[4], b[4];
    SHERD_UNROLL
    for (int i = 0; i < 4; ++i)
      a[i] = narrow_pair<S>(weights[m + i / 2][i % 2 * 2], weights[m + i / 2][i % 2 * 2 + 1]);
    SHERD_UNROLL
    for (int n = 0; n < Shape::columns; n += 2) {
      load_matrices<true>(b, from + 8 * m * Shape::row + 8 * n);
      mma_16x8x16(sums[n], a, {b[0], b[1]}, S{});
      mma_16x8x16(sums[n + 1], a, {b[2], b[3]}, S{});
    }
  }
}

template <int count>
__device__ void clear(float (&sums)[count][4]) {
  SHERD_UNROLL
  for (int n = 0; n < count; ++n) {
    SHERD_UNROLL
    for (int i = 0; i < 4; ++i) sums[n][i] = 0;
  }
}

/// Rounds a lane's sums, times `times` of their row, to the rows of a matrix; rows from `count` on are left
/// out.
template <class Shape, class S>
__device__ void store_rows(const float (&sums)[Shape::columns][4], const float (&times)[2], S* to,
                           Count stride, Count count, int dim) {
  SHERD_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row(half);
    if (row >= count) continue;
    SHERD_UNROLL
    for (int n = 0; n < Shape::columns; ++n) {
      const int d = 8 * n + 2 * lane_pair();
      if (d < dim)
        store_pack(to + row * stride + d,
                   bits_as<Pack<S, 2>>(
                       narrow_pair<S>(sums[n][2 * half] * times[half], sums[n][2 * half + 1] * times[half])));
    }
  }
}

/// The part that the lane's two rows see, or are seen by, of the rows that a warp goes through: of up to
/// 2^30.
struct SeenByRows {
  int first[2], end[2];
  int warp_first, warp_end;  ///< for all 16 rows of the warp

  /// The keys that queries `at` on see.
  template <class S>
  static __device__ SeenByRows keys(const AttentionArguments<S>& a, Count at) {
    SeenByRows out;
    SHERD_UNROLL
    for (int half = 0; half < 2; ++half) {
      const SeenRange seen = a.seen_by(at + lane_row(half));
      out.first[half] = static_cast<int>(seen.first), out.end[half] = static_cast<int>(seen.end);
    }
    out.warp_first = static_cast<int>(a.seen.first(at + warp_row()));
    out.warp_end = static_cast<int>(a.seen.end(at + warp_row() + 15, a.seq));
    return out;
  }
  /// The queries that see keys `at` on.
  template <class S>
  static __device__ SeenByRows queries(const AttentionArguments<S>& a, Count at) {
    SeenByRows out;
    SHERD_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Count key = at + lane_row(half);
      out.first[half] = static_cast<int>(a.seen.first_query(key));
      out.end[half] = key < a.seq ? static_cast<int>(a.seen.end_query(key, a.seq)) : 0;
    }
    out.warp_first = static_cast<int>(a.seen.first_query(at + warp_row()));
    out.warp_end = static_cast<int>(a.seen.end_query(at + warp_row() + 15, a.seq));
    return out;
  }

  __device__ bool has(int half, int other) const { return other >= first[half] && other < end[half]; }
  /// Whether that is all of the rows from `at` on; whether it is any of them for the warp.
  __device__ bool all(int at, int count) const {
    return at >= first[0] && at >= first[1] && at + count <= end[0] && at + count <= end[1];
  }
  __device__ bool any(int at, int count) const { return at + count > warp_first && at < warp_end; }
};

/// Bit 2·half + e tells whether dropout keeps that number of the lane's in the warp's fragment of 16 queries
/// and 8 keys. Each lane asks for four keys that follow each other, and pairs of lanes hand them on.
template <class S>
__device__ unsigned kept_by_queries(const AttentionArguments<S>& a, Count first, Count query, Count key) {
  const int pair = lane_pair(), odd = pair % 2;
  unsigned bits = kept_scores<4>(a, first, query + lane_group() + 8 * odd, key + pair / 2 * 4) & 15u;
  bits <<= 4 * odd;
  bits |= __shfl_xor_sync(device::SHERD_CUDA::all_lanes, bits, 1);
  bits >>= 2 * odd;
  return (bits & 3u) | (bits >> 2 & 12u);
}
/// The same of a fragment of 16 keys and 8 queries, by fours of lanes.
template <class S>
__device__ unsigned kept_by_keys(const AttentionArguments<S>& a, Count first, Count query, Count key) {
  const int group = lane_group(), place = group % 4;
  unsigned bits =
      kept_scores<4>(a, first, query + 2 * lane_pair() + place % 2, key + group / 4 * 4 + place / 2 * 8) &
      15u;
  bits <<= 4 * place;
  bits |= __shfl_xor_sync(device::SHERD_CUDA::all_lanes, bits, 4);
  bits |= __shfl_xor_sync(device::SHERD_CUDA::all_lanes, bits, 8);
  bits >>= place;
  return (bits & 1u) | (bits >> 3 & 2u) | (bits >> 6 & 4u) | (bits >> 9 & 8u);
}

inline constexpr float log2_e = 0x1.715476p0f;

}  // namespace sherd::tensor::SHERD_CUDA
