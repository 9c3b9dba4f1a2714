#include <algorithm>
#include <bit>
#include <limits>

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"

// Flash-decoding (Dao et al. 2023): a block attends to a chunk of a text's keys, for query heads that share
// them, and what chunks give is merged. Keys of the call itself are read from qkv. They are stored when all
// its rows have been attended to, for in a ring they take the places of keys that rows before them see.

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The lanes of a block form teams that share the keys out, and the lanes of a team the elements of a head.
constexpr int stored_threads = 256;
constexpr int lane_elements = 8;
constexpr int longest_cached_head = 32 * lane_elements;

template <class S>
struct StoredArguments {
  using C = Compute<S>;
  const S *qkv, *sinks;    ///< sinks may be null
  S *keys, *values, *out;  ///< out may be null
  /// Results by [row, head, chunk], not divided yet; null where there is but one chunk.
  C *parts, *tops, *sums;
  const std::int32_t* places;
  Count width, capacity;
  int seq, heads, kv_heads, dim;
  int most_keys, chunk, chunks;  ///< keys that a row sees at most, cut into chunks
  int lane_bits;                 ///< a team has 1 << lane_bits lanes
  C scale, cap;

  /// The sink's term in a sum of exponentials whose highest is of `top`.
  __device__ C of_sink(Count head, C top) const {
    return sinks ? exp_anywhere<C>(widen(sinks[head]) - top) : C{0};
  }
  __device__ int group() const { return heads / kv_heads; }
  __device__ int lanes() const { return 1 << lane_bits; }
  __device__ int teams() const { return stored_threads >> lane_bits; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  __device__ int team() const { return static_cast<int>(threadIdx.x) >> lane_bits; }
};

/// Row blockIdx.x of a call, for one key-value head, and the keys that it sees in order of their positions:
/// `old` ones from the store, the rest from rows of the call.
template <class S>
struct StoredRow {
  int sequence, index, counting;  ///< its sequence, which of its rows it is, and how many of them count
  int begin, position;            ///< positions of the sequence's first row and of this one
  int count, first, old;          ///< keys, none for a row that does not count; position of the first one
  unsigned ring, first_place;
  S *keys, *values;           ///< the text's rows in the store
  const S *queries, *latest;  ///< in qkv; the latest key is the row's own

  __device__ StoredRow(const StoredArguments<S>& a, int g)
      : sequence(static_cast<int>(blockIdx.x) / a.seq),
        index(static_cast<int>(blockIdx.x) - sequence * a.seq),
        counting(a.places[3 * sequence + 2]),
        begin(a.places[3 * sequence + 1]),
        position(begin + index),
        count(index < counting ? std::min(position + 1, a.most_keys) : 0),
        first(position + 1 - count),
        old(begin > first ? begin - first : 0),
        // Positions have 31 bits, so those of a larger store never come round.
        ring(static_cast<unsigned>(a.capacity < 0x7fffffff ? a.capacity : 0x7fffffff)),
        first_place(static_cast<unsigned>(first) % ring),
        keys(a.keys + (Count{a.places[3 * sequence]} * a.kv_heads + g) * a.capacity * a.dim),
        values(a.values + (keys - a.keys)),
        queries(a.qkv + Count{blockIdx.x} * a.width + Count{g} * (a.group() + 2) * a.dim),
        latest(queries + a.group() * a.dim) {}
  __device__ int chunks(const StoredArguments<S>& a) const { return (count + a.chunk - 1) / a.chunk; }

  struct KeyPair {
    const S *key, *value;
  };
  /// The n-th key that it sees.
  __device__ KeyPair at(const StoredArguments<S>& a, int n) const {
    unsigned place = first_place + static_cast<unsigned>(n);
    place -= place >= ring ? ring : 0;
    const bool stored = n < old;
    const Count offset = stored ? Count{place} * a.dim : (n + 1 - count) * a.width;
    return {(stored ? keys : latest) + offset, (stored ? values : latest + a.dim) + offset};
  }

  /// Stores its key and value, by all threads of a block and packs of `width`.
  template <int width>
  __device__ void store(const StoredArguments<S>& a) const {
    const Count to = Count{static_cast<unsigned>(position) % ring} * a.dim;
    for (int d = static_cast<int>(threadIdx.x) * width; d < 2 * a.dim;
         d += static_cast<int>(blockDim.x) * width)
      store_pack(d < a.dim ? keys + to + d : values + to + d - a.dim, load_pack<width>(latest + d));
  }
};

/// A lane's elements of one head: packs number lane, lane + lanes, … of it; zeros behind its end. Pairs of
/// bf16 are kept as words, of which a shift or a mask makes fp32.
template <class S, int width>
struct LanePacks {
  static constexpr int count = lane_elements / width;
  static constexpr bool words = std::is_same_v<S, bf16> && width > 1;
  using KeyWords = std::conditional_t<words, std::uint32_t, S>;
  static constexpr int kept_width = words ? width / 2 : width;
  Pack<KeyWords, kept_width> pack[count];

  __device__ static int first(const StoredArguments<S>& a, int p) {
    return ((p << a.lane_bits) + a.lane()) * width;
  }
  __device__ void load(const StoredArguments<S>& a, const S* head) {
    SHERD_UNROLL
    for (int p = 0; p < count; ++p) {
      pack[p] = {};
      if (first(a, p) < a.dim)
        pack[p] = load_pack<kept_width>(reinterpret_cast<const KeyWords*>(head + first(a, p)));
    }
  }
  __device__ Compute<S> at(int element) const {
    const KeyWords kept = pack[element / width].at[element % width * kept_width / width];
    if constexpr (words)
      return bits_as<float>(element % 2 == 0 ? kept << 16 : kept & 0xffff0000u);
    else
      return widen(kept);
  }
};

/// The result of a team for each of `heads` queries: the softmax over its keys, not divided yet.
template <class C, int heads>
struct PartialSoftmax {
  C top[heads], sum[heads], at[heads][lane_elements];

  __device__ PartialSoftmax() {
    SHERD_UNROLL
    for (int h = 0; h < heads; ++h) {
      top[h] = std::numeric_limits<C>::lowest(), sum[h] = 0;
      SHERD_UNROLL
      for (int e = 0; e < lane_elements; ++e) at[h][e] = 0;
    }
  }
};

/// A team's share of the row's keys [begin, end). All threads of a block call.
template <int width, int heads, class S, class C = Compute<S>>
__device__ inline PartialSoftmax<C, heads> attend_keys(const StoredArguments<S>& a, const StoredRow<S>& row,
                                                       const C (&queries)[heads][lane_elements], int begin,
                                                       int end) {
  // Keys on their way to a lane: as many bytes of them as leave registers for two blocks.
  constexpr int at_once = (heads > 1 ? 4 : 8) / static_cast<int>(sizeof(S));
  const int teams = a.teams();
  PartialSoftmax<C, heads> found;
  for (int step = begin; step < end; step += teams * at_once) {
    const int mine = step + a.team();
    LanePacks<S, width> keys[at_once], values[at_once];
    SHERD_UNROLL
    for (int u = 0; u < at_once; ++u) {  // behind the end the last one, which gets no weight there
      const int n = mine + u * teams;
      const auto pair = row.at(a, std::min(n, end - 1));
      keys[u].load(a, pair.key), values[u].load(a, pair.value);
    }
    C scores[heads][at_once]{};
    SHERD_UNROLL
    for (int u = 0; u < at_once; ++u) {
      SHERD_UNROLL
      for (int e = 0; e < lane_elements; ++e) {
        const C key = keys[u].at(e);
        SHERD_UNROLL
        for (int h = 0; h < heads; ++h) scores[h][u] = fused(queries[h][e], key, scores[h][u]);
      }
    }
    for (int distance = a.lanes() / 2; distance >= 1; distance /= 2) {
      SHERD_UNROLL
      for (int h = 0; h < heads; ++h) {
        SHERD_UNROLL
        for (int u = 0; u < at_once; ++u)
          scores[h][u] += __shfl_xor_sync(device::SHERD_CUDA::all_lanes, scores[h][u], distance);
      }
    }
    if (a.cap > 0) {
      SHERD_UNROLL
      for (int h = 0; h < heads; ++h) {
        SHERD_UNROLL
        for (int u = 0; u < at_once; ++u) scores[h][u] = a.cap * tanh_of(scores[h][u] / a.cap);
      }
    }
    SHERD_UNROLL
    for (int h = 0; h < heads; ++h) {
      C top = found.top[h];
      SHERD_UNROLL
      for (int u = 0; u < at_once; ++u)
        top = mine + u * teams < end && scores[h][u] > top ? scores[h][u] : top;
      const C keep = exp_for<S>(found.top[h] - top);
      found.top[h] = top, found.sum[h] *= keep;
      SHERD_UNROLL
      for (int e = 0; e < lane_elements; ++e) found.at[h][e] *= keep;
      SHERD_UNROLL
      for (int u = 0; u < at_once; ++u) {
        const C weight = exp_for<S>(scores[h][u] - top);
        scores[h][u] = mine + u * teams < end ? weight : C{0};
        found.sum[h] += scores[h][u];
      }
    }
    SHERD_UNROLL
    for (int u = 0; u < at_once; ++u) {
      SHERD_UNROLL
      for (int e = 0; e < lane_elements; ++e) {
        const C value = values[u].at(e);
        SHERD_UNROLL
        for (int h = 0; h < heads; ++h) found.at[h][e] = fused(scores[h][u], value, found.at[h][e]);
      }
    }
  }
  return found;
}

/// Every gridDim.z-th chunk of one row's keys, for `heads` of the query heads that share them, or as many as
/// are left. Rows that do not count get zeros. The row of a call of one row is stored here: nobody reads in
/// its place.
template <int width, int heads, class S>
__global__ void __launch_bounds__(stored_threads, width > 1 ? 2 : 1)
    attend_chunks_kernel(StoredArguments<S> a) {
  using C = Compute<S>;
  SHERD_DYNAMIC_SHARED(C, values);  // [head, team, element]
  const int teams = a.teams(), padded = a.lanes() * lane_elements, thread = static_cast<int>(threadIdx.x);
  C *tops = values + heads * teams * padded, *sums = tops + heads * teams;  // [head, team]
  const int tiles = (a.group() + heads - 1) / heads, tile = static_cast<int>(blockIdx.y) % tiles;
  const int g = static_cast<int>(blockIdx.y) / tiles, present = std::min(heads, a.group() - tile * heads);
  const Count first_head = Count{blockIdx.x} * a.heads + g * a.group() + tile * heads;
  const StoredRow<S> row(a, g);
  if (row.count == 0) {
    for (int d = thread; blockIdx.z == 0 && d < present * a.dim; d += stored_threads)
      a.out[first_head * a.dim + d] = narrow<S>(C{0});
    return;
  }
  if (a.seq == 1 && tile == 0 && blockIdx.z == 0) row.template store<width>(a);
  C queries[heads][lane_elements];
  SHERD_UNROLL
  for (int h = 0; h < heads; ++h) {  // behind the last head that one, for nobody
    LanePacks<S, width> query;
    query.load(a, row.queries + (tile * heads + std::min(h, present - 1)) * a.dim);
    SHERD_UNROLL
    for (int e = 0; e < lane_elements; ++e) queries[h][e] = query.at(e) * a.scale;
  }
  for (int c = static_cast<int>(blockIdx.z); c < row.chunks(a); c += static_cast<int>(gridDim.z)) {
    const int begin = c * a.chunk, end = std::min(row.count - begin, a.chunk) + begin;
    const PartialSoftmax<C, heads> mine = attend_keys<width>(a, row, queries, begin, end);
    __syncthreads();  // until everyone has read what is shared of the chunk before
    SHERD_UNROLL
    for (int h = 0; h < heads; ++h) {
      const int team = h * teams + a.team();
      if (a.lane() == 0) tops[team] = mine.top[h], sums[team] = mine.sum[h];
      SHERD_UNROLL
      for (int p = 0; p < LanePacks<S, width>::count; ++p) {
        Pack<C, width> pack;
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) pack.at[k] = mine.at[h][p * width + k];
        store_pack(values + team * padded + LanePacks<S, width>::first(a, p), pack);
      }
    }
    __syncthreads();
    for (int item = thread; item < present * a.dim; item += stored_threads) {
      const int h = item / a.dim, d = item - h * a.dim, team = h * teams;
      C top = tops[team], sum = 0, value = 0;
      for (int t = team + 1; t < team + teams; ++t) top = tops[t] > top ? tops[t] : top;
      for (int t = team; t < team + teams; ++t) {
        const C weight = exp_for<S>(tops[t] - top);
        sum = fused(weight, sums[t], sum), value = fused(weight, values[t * padded + d], value);
      }
      const Count head = first_head + h, part = head * a.chunks + c;
      if (!a.parts) {
        a.out[head * a.dim + d] = narrow<S>(value / (sum + a.of_sink(head % a.heads, top)));
        continue;
      }
      a.parts[part * a.dim + d] = value;
      if (d == 0) a.tops[part] = top, a.sums[part] = sum;
    }
  }
}

/// One row of one query head, of all its chunks: each warp takes every eighth of them.
template <class S>
__global__ void __launch_bounds__(stored_threads) merge_chunks_kernel(StoredArguments<S> a) {
  using C = Compute<S>;
  constexpr int warps = stored_threads / 32;
  SHERD_SHARED(C, sums, warps);
  SHERD_SHARED(C, values, warps * longest_cached_head);
  const auto head = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  const StoredRow<S> row(a, head / a.group());
  if (row.count == 0) return;
  const Count place = Count{blockIdx.x} * a.heads + head, first = place * a.chunks;
  C top = std::numeric_limits<C>::lowest();
  for (int c = lane; c < row.chunks(a); c += 32) top = a.tops[first + c] > top ? a.tops[first + c] : top;
  top = warp_reduce(top, device::SHERD_CUDA::Larger{});
  C sum = 0, at[lane_elements]{};
  for (int c = warp; c < row.chunks(a); c += warps) {
    const C weight = exp_for<S>(a.tops[first + c] - top);
    sum = fused(weight, a.sums[first + c], sum);
    SHERD_UNROLL
    for (int e = 0; e < lane_elements; ++e) {
      const int d = lane + 32 * e;
      if (d < a.dim) at[e] = fused(weight, a.parts[(first + c) * a.dim + d], at[e]);
    }
  }
  if (lane == 0) sums[warp] = sum;
  SHERD_UNROLL
  for (int e = 0; e < lane_elements; ++e) values[warp * longest_cached_head + lane + 32 * e] = at[e];
  __syncthreads();
  if (thread >= a.dim) return;
  C total = a.of_sink(head, top), value = 0;
  for (int w = 0; w < warps; ++w) total += sums[w], value += values[w * longest_cached_head + thread];
  a.out[place * a.dim + thread] = narrow<S>(value / total);
}

/// The key and the value of one row, unless a later row of the call takes their place.
template <int width, class S>
__global__ void store_rows_kernel(StoredArguments<S> a) {
  const StoredRow<S> row(a, static_cast<int>(blockIdx.y));
  if (row.count > 0 && row.index + a.capacity >= row.counting) row.template store<width>(a);
}

/// Query heads that one block takes: as many as registers hold.
template <class S>
constexpr int most_heads = sizeof(Compute<S>) == 4 ? 4 : 1;

template <int width, int heads, class S>
void attend_chunks(const Target& target, unsigned rows, const StoredArguments<S>& a) {
  const int group = a.heads / a.kv_heads, tiles = (group + heads - 1) / heads;
  if constexpr (heads > 1)
    if (group <= heads / 2) return attend_chunks<width, heads / 2>(target, rows, a);
  // However many blocks share the chunks out, each chunk's sums are its own.
  const Count columns = Count{rows} * a.kv_heads * tiles;
  const Count blocks = blocks_for(columns * a.chunks, 1, target.processors);
  const dim3 grid(rows, static_cast<unsigned>(a.kv_heads * tiles),
                  static_cast<unsigned>((blocks + columns - 1) / columns));
  const int shared = heads * (stored_threads * lane_elements + 2 * (stored_threads >> a.lane_bits));
  launch(attend_chunks_kernel<width, heads, S>, grid, stored_threads,
         static_cast<std::size_t>(shared) * sizeof(Compute<S>), target.stream, a);
}

template <int width, class S>
void run(const Target& target, unsigned rows, const StoredArguments<S>& a) {
  const auto heads = static_cast<unsigned>(a.heads), kv_heads = static_cast<unsigned>(a.kv_heads);
  if (a.out) attend_chunks<width, most_heads<S>>(target, rows, a);
  if (a.parts) launch(merge_chunks_kernel<S>, dim3(rows, heads), stored_threads, 0, target.stream, a);
  if (!a.out || a.seq > 1) launch(store_rows_kernel<width, S>, dim3(rows, kv_heads), 64, 0, target.stream, a);
}

}  // namespace

void CudaKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  require(e.dim <= longest_cached_head, "attend_stored: heads of ", e.dim, " elements are longer than ",
          longest_cached_head);
  require(store.values.defined(), "attend_stored: keys that are values too, on a GPU");
  if (e.batch == 0 || e.seq == 0) return;
  const StoredChunks cut(e);
  const Count parts = e.batch * e.seq * e.heads * cut.count;
  const Tensor found = out && cut.count > 1 ? scratch(cut.numbers(e), compute_type(qkv.dtype())) : Tensor();
  with_floating(qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    StoredArguments<S> a{};
    a.qkv = in<S>(qkv), a.places = in<std::int32_t>(store.places);
    a.keys = SHERD_CUDA::out<S>(store.keys), a.values = SHERD_CUDA::out<S>(store.values);
    if (sinks) a.sinks = in<S>(sinks);
    if (out) a.out = SHERD_CUDA::out<S>(out);
    if (found) a.parts = SHERD_CUDA::out<C>(found), a.tops = a.parts + parts * e.dim, a.sums = a.tops + parts;
    a.width = e.width(), a.capacity = e.capacity, a.scale = static_cast<C>(e.scale);
    a.cap = static_cast<C>(e.cap);
    const auto whole = [](Count n) { return static_cast<int>(n); };
    a.seq = whole(e.seq), a.heads = whole(e.heads), a.kv_heads = whole(e.kv_heads), a.dim = whole(e.dim);
    a.most_keys = whole(cut.most_keys), a.chunk = whole(cut.keys), a.chunks = whole(cut.count);
    a.lane_bits = std::bit_width(static_cast<unsigned>((e.dim - 1) / lane_elements));
    const auto rows = static_cast<unsigned>(e.batch * e.seq);
    const bool packs = e.dim % pack_width<S> == 0 && aligned_for_packs(a.qkv, a.keys, a.values);
    packs ? run<pack_width<S>>(target_, rows, a) : run<1>(target_, rows, a);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
