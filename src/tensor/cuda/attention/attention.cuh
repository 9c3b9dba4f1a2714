#pragma once

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/extents.h"

// The parts of attention's kernels (FlashAttention, Dao et al. 2022): tiles of queries and keys in shared
// memory, as elements of compute type; products between them in registers. A block has 256 threads in a
// square; thread (ty, tx) owns rows ty·r … of a tile of scores and every 16th column from tx.

namespace sherd::tensor::SHERD_CUDA {

inline constexpr int attention_threads = 256, attention_side = 16;

/// A thread's place in the square of its block.
__device__ inline int thread_row() {
  return static_cast<int>(threadIdx.x) / attention_side;
}
__device__ inline int thread_column() {
  return static_cast<int>(threadIdx.x) % attention_side;
}

/// Sizes for heads of up to `most` elements: tiles of `tile` rows, `r` per thread.
template <class C, int most_dim, int rows_per_thread>
struct AttentionShape {
  static constexpr int r = rows_per_thread, tile = attention_side * r, vec = pack_width<C>;
  static constexpr int parts = most_dim / (attention_side * vec);  ///< packs of a row of sums per thread
  static constexpr int score_row = tile + vec;                     ///< a row of scores in shared memory
};

/// The keys that a query sees.
struct SeenRange {
  Count first, end;
  __device__ bool has(Count key) const { return key >= first && key < end; }
};

/// The arguments of every kernel of attention.
template <class S>
struct AttentionArguments {
  const S *qkv, *out, *dout;
  S *to, *dqkv;
  Compute<S>*lse, *delta;
  Count batch, step, dim, width;  ///< step: rows of a sequence; width: of a packed row
  Count seq;                      ///< rows that see each other
  int heads, kv_heads, row;       ///< row: elements from row to row of a tile in shared memory
  Compute<S> scale, cap;
  SeenKeys seen;
  bool packs;               ///< rows can be read by four elements
  std::uint32_t threshold;  ///< dropout's keep_threshold(); 0 without dropout
  Compute<S> factor;        ///< 1/(1 - p)
  RandomKey key;
  Count score_heads, score_seq, first_score;  ///< as in AttentionExtents

  /// The score that is made of the product of a query and a key.
  __device__ Compute<S> score(Compute<S> product) const {
    return cap > 0 ? cap * tanh_of(product * scale / cap) : product * scale;
  }
  /// By how much a score of that value grows with the product, over the scale.
  __device__ Compute<S> slope(Compute<S> score) const {
    return cap > 0 ? 1 - score / cap * (score / cap) : Compute<S>{1};
  }
  __device__ int group() const { return heads / kv_heads; }
  __device__ Count query_col(int head) const {
    return (Count{head / group()} * (group() + 2) + head % group()) * dim;
  }
  /// None for rows behind the last one.
  __device__ SeenRange seen_by(Count query) const {
    return {seen.first(query), query < seq ? seen.end(query, seq) : 0};
  }
  __device__ Count key_col(int g) const { return (Count{g} * (group() + 2) + group()) * dim; }
  __device__ Count value_col(int g) const { return key_col(g) + dim; }
  __device__ Count first_score_of(Count b, int head) const {
    return first_score + (b * score_heads + head) * score_seq * score_seq;
  }
};

/// The work of a block: a tile of queries or keys of one head, in rows that see each other and no others.
struct TileIndex {
  Count batch, begin;  ///< sequence that these rows are of, and the first of them
  Count first;         ///< the tile's first one among them
  int head;
  bool empty = false;  ///< there is no such tile

  /// Their first one among all of the call.
  template <class S>
  __device__ Count row(const AttentionArguments<S>& a) const {
    return batch * a.step + begin;
  }
  /// Where lse and delta have the number of one of them, for a head.
  template <class S>
  __device__ Count number(const AttentionArguments<S>& a, int of, Count query) const {
    return (batch * a.heads + of) * a.step + begin + query;
  }
};

/// Whole sequences: tiles of the same place follow each other over heads and sequences. With a causal mask
/// (`last_first`) long ones come first, so that short ones fill the gaps at the end.
struct WholeSequences {
  template <class S>
  __device__ TileIndex find(const AttentionArguments<S>& a, int heads, int tile, bool last_first) const {
    const Count tiles = (a.seq + tile - 1) / tile, each = gridDim.x / tiles, at = blockIdx.x / each;
    const Count first = (last_first ? tiles - 1 - at : at) * tile;
    const int head = static_cast<int>(blockIdx.x % each % heads);
    return {blockIdx.x % each / heads, 0, first, head};
  }
};

/// Documents, and the tiles of one after the other, each for all heads.
struct DocumentTable {
  static constexpr int most = 256;
  int count = 0, tiles = 0;                    ///< documents, and tiles of them all
  int row[most]{}, seq[most]{}, tile[most]{};  ///< first row among all of the call, rows, and first tile

  /// Makes a block's arguments those of its document, too.
  template <class S>
  __device__ TileIndex find(AttentionArguments<S>& a, int heads, int rows_per_tile, bool last_first) const {
    const int at = static_cast<int>(blockIdx.x) / heads;
    int i = 0;  // the last one whose tiles do not begin behind this
    for (int half = most / 2; half >= 1; half /= 2)
      if (i + half < count && tile[i + half] <= at) i += half;
    const int end = i + 1 < count ? tile[i + 1] : tiles, place = last_first ? end - 1 - at : at - tile[i];
    const Count batch = row[i] / a.step, begin = row[i] % a.step;
    a.seq = seq[i];
    a.key = a.key.at(static_cast<std::uint64_t>(batch));
    // Every sequence draws what it would draw alone.
    a.first_score += begin * (a.score_seq + 1) - batch * a.score_heads * a.score_seq * a.score_seq;
    const int head = static_cast<int>(blockIdx.x) % heads;
    return {batch, begin, Count{place} * rows_per_tile, head, at >= tiles};
  }
};
static_assert(sizeof(DocumentTable) + sizeof(AttentionArguments<double>) <= 4096, "a kernel's arguments");

/// Brings rows [0, count) of a matrix whose rows are `stride` apart to shared memory, in compute type; zeros
/// in the columns behind dim and in the rows behind count. With `spread`, row j goes to place (j mod r)·16 +
/// j/r: the columns of a thread's scores are then r consecutive rows.
template <class Shape, bool spread, class S>
__device__ void load_tile(const AttentionArguments<S>& a, const S* from, Count stride, Count count,
                          Compute<S>* to) {
  using C = Compute<S>;
  constexpr int width = 4;
  const int dims = (static_cast<int>(a.dim) + Shape::vec - 1) / Shape::vec * Shape::vec;
  const auto place = [](int j) { return spread ? j % Shape::r * attention_side + j / Shape::r : j; };
  if (a.packs) {
    const int packs = static_cast<int>(a.dim) / width;
    for (int item = static_cast<int>(threadIdx.x); item < Shape::tile * packs; item += attention_threads) {
      const int j = item / packs, d = (item - j * packs) * width;
      Pack<S, width> values{};
      if (j < count) values = load_pack<width>(from + j * stride + d);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) to[place(j) * a.row + d + k] = widen(values.at[k]);
    }
    return;
  }
  for (int item = static_cast<int>(threadIdx.x); item < Shape::tile * dims; item += attention_threads) {
    const int j = item / dims, d = item - j * dims;
    to[place(j) * a.row + d] = j < count && d < a.dim ? widen(from[j * stride + d]) : C{0};
  }
}

/// scores[i][c] = row ty·r + i of `left` times place tx + 16·c of `right`.
template <class Shape, class C>
__device__ void dot_tiles(const C* left, const C* right, int row, int dim, C (&scores)[Shape::r][Shape::r]) {
  constexpr int r = Shape::r, vec = Shape::vec;
  const int ty = thread_row(), tx = thread_column();
  for (int i = 0; i < r; ++i)
    for (int c = 0; c < r; ++c) scores[i][c] = 0;
  for (int d = 0; d < dim; d += vec) {
    Pack<C, vec> a[r], b[r];
    SHERD_UNROLL
    for (int i = 0; i < r; ++i) a[i] = load_pack<vec>(left + (ty * r + i) * row + d);
    SHERD_UNROLL
    for (int c = 0; c < r; ++c) b[c] = load_pack<vec>(right + (tx + attention_side * c) * row + d);
    SHERD_UNROLL
    for (int i = 0; i < r; ++i) {
      SHERD_UNROLL
      for (int c = 0; c < r; ++c) {
        SHERD_UNROLL
        for (int k = 0; k < vec; ++k) scores[i][c] = fused(a[i].at[k], b[c].at[k], scores[i][c]);
      }
    }
  }
}

/// Puts a thread's scores where add_product() reads them.
template <class Shape, class C>
__device__ void store_scores(const C (&scores)[Shape::r][Shape::r], C* to) {
  const int ty = thread_row(), tx = thread_column();
  SHERD_UNROLL
  for (int i = 0; i < Shape::r; ++i) {
    SHERD_UNROLL
    for (int c = 0; c < Shape::r; ++c)
      to[(ty * Shape::r + i) * Shape::score_row + tx + attention_side * c] = scores[i][c];
  }
}

/// Sums of a thread: rows ty·r + i, columns (tx + 16·part)·vec + k.
template <class Shape, class C>
struct RowSums {
  C at[Shape::r][Shape::parts][Shape::vec];

  __device__ void clear() {
    for (int i = 0; i < Shape::r; ++i)
      for (int part = 0; part < Shape::parts; ++part)
        for (int k = 0; k < Shape::vec; ++k) at[i][part][k] = 0;
  }

  /// += scores[tile, tile]·right[tile, dim], where the places of `right` are the columns of the scores.
  __device__ void add_product(const C* scores, const C* right, int row, int dim) {
    constexpr int r = Shape::r, vec = Shape::vec;
    const int ty = thread_row(), tx = thread_column();
    for (int j = 0; j < Shape::tile; j += vec) {
      Pack<C, vec> p[r];
      SHERD_UNROLL
      for (int i = 0; i < r; ++i) p[i] = load_pack<vec>(scores + (ty * r + i) * Shape::score_row + j);
      SHERD_UNROLL
      for (int part = 0; part < Shape::parts; ++part) {
        const int d = (tx + attention_side * part) * vec;
        if (d >= dim) continue;
        SHERD_UNROLL
        for (int step = 0; step < vec; ++step) {
          const Pack<C, vec> v = load_pack<vec>(right + (j + step) * row + d);
          SHERD_UNROLL
          for (int i = 0; i < r; ++i) {
            SHERD_UNROLL
            for (int k = 0; k < vec; ++k) at[i][part][k] = fused(p[i].at[step], v.at[k], at[i][part][k]);
          }
        }
      }
    }
  }

  /// Rounds row i, times factor(i), to the rows of a matrix; rows from `count` on are left out.
  template <class S, class Fn>
  __device__ void store(S* to, Count stride, Count count, Count dim, const Fn& factor) const {
    const int ty = thread_row(), tx = thread_column();
    SHERD_UNROLL
    for (int i = 0; i < Shape::r; ++i) {
      const int row = ty * Shape::r + i;
      if (row >= count) continue;
      const C times = factor(i);
      SHERD_UNROLL
      for (int part = 0; part < Shape::parts; ++part) {
        SHERD_UNROLL
        for (int k = 0; k < Shape::vec; ++k) {
          const int d = (tx + attention_side * part) * Shape::vec + k;
          if (d < dim) to[row * stride + d] = narrow<S>(at[i][part][k] * times);
        }
      }
    }
  }
};

/// Bit c tells whether dropout keeps the score of `query` and key `key` + c, for c < n <= 4. `first`: the
/// number of the head's first score.
template <int n, class S>
__device__ unsigned kept_scores(const AttentionArguments<S>& a, Count first, Count query, Count key) {
  const auto index = static_cast<std::uint64_t>(first + query * a.score_seq + key);
  const unsigned shift = static_cast<unsigned>(index % 4);
  const auto words = philox(a.key, index / 4);
  unsigned bits = 0;
  for (unsigned w = 0; w < 4; ++w) bits |= (words[w] >> 8 >= a.threshold ? 1u : 0u) << w;
  if (shift + n > 4) {
    const auto more = philox(a.key, index / 4 + 1);
    for (unsigned w = 0; w < 4; ++w) bits |= (more[w] >> 8 >= a.threshold ? 1u : 0u) << (4 + w);
  }
  return bits >> shift;
}

/// The kernels of attention by tensor cores (attention_mma.cu), for bf16 and f16: the forward pass, and the
/// gradients of queries and of keys and values. Their work is cut into tiles of `mma_tile` queries, or keys.
enum class MmaKernel : std::uint8_t { forward, dq, dkv };
inline constexpr int mma_tile = 64;

/// Whether they take this call: heads of up to 128 elements in steps of 16, aligned to 16 bytes, scores that
/// are not capped, and where the GPU's blocks have the shared memory.
template <class S>
bool mma_takes(const Target& target, const AttentionArguments<S>& a);

/// Queues one, for tiles of `parts` by so many blocks.
template <class S, class Parts>
void launch_mma(MmaKernel kernel, const Target& target, const AttentionArguments<S>& a, const Parts& parts,
                unsigned blocks);

}  // namespace sherd::tensor::SHERD_CUDA
