#pragma once

#include "tensor/cpu/isa/attention.h"
#include "tensor/cpu/isa/philox.h"
#include "tensor/cpu/isa/tiles.h"
#include "tensor/cpu/isa/vec_math.h"

// FlashAttention (Dao et al. 2022) with queries in the lanes: tiles of scores are kept as [keys, queries], so that maxima, sums and
// rescaling go element by element, and the tile becomes the right operand of the next product as it is.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr Count key_block = 128;  ///< keys whose scores are in flight; a multiple of 4, the block of the random stream
constexpr float very_low = -1e30f;

/// Cuts scratch memory into arrays on cache lines. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(Count n) {
    T* out = reinterpret_cast<T*>(base_ + used_);
    used_ += ceil_to(n * static_cast<Count>(sizeof(T)), 64);
    return out;
  }
  Count used() const { return used_; }

 private:
  char* base_;
  Count used_ = 0;
};

/// The queries q0 + lane of one register.
SHERD_INLINE I lane_indices(Count q0) {
  I out;
#pragma GCC unroll 16
  for (int l = 0; l < lanes; ++l) out[l] = static_cast<std::int32_t>(q0) + l;
  return out;
}

/// Which scores of the queries of one register dropout keeps, key by key.
class Keeper {
 public:
  Keeper(const AttentionHead& head, Count q0) : head_(head), aligned_(head.seq % 4 == 0 && head.first % 4 == 0) {
    std::uint32_t low[lanes], high[lanes];
    for (int l = 0; l < lanes; ++l) {
      const std::uint64_t index = head.first + static_cast<std::uint64_t>((q0 + l) * head.seq);
      low[l] = static_cast<std::uint32_t>(index);
      high[l] = static_cast<std::uint32_t>(index >> 32);
    }
    low_ = load_as<U>(low), high_ = load_as<U>(high);
  }

  /// All bits set where score (lane, key) is kept. Keys must come in order, from a multiple of 4.
  SHERD_INLINE I keeps(Count key) {
    const U offset = all(static_cast<std::uint32_t>(key));
    const U low = low_ + offset;
    if (!aligned_ || key % 4 == 0) {
      const U high = high_ - (U)(low < offset);
      philox_blocks(head_.seed, head_.stream, (low >> 2) | (high << 30), high >> 2, words_);
    }
    U word = words_[key % 4];
    if (!aligned_) {
      const U which = low & 3u;
      word = which == 0u ? words_[0] : which == 1u ? words_[1] : which == 2u ? words_[2] : words_[3];
    }
    return (I)(word >> 8) >= (I)all(head_.threshold);
  }

 private:
  const AttentionHead& head_;
  bool aligned_;
  U low_{}, high_{}, words_[4]{};
};

template <class Dot>
struct AttentionLoops {
  using Element = typename Dot::Element;
  static constexpr int per = Dot::per_unit;

  static Count units(Count n) { return (n + per - 1) / per; }
  static const std::uint32_t* as_units(const Element* e) { return reinterpret_cast<const std::uint32_t*>(e); }
  /// Units from row to row of a matrix that products read eight rows of at once: not a power of two.
  static Count padded(Count n) { return ceil_to(units(n), 16) + 16; }
  static Count out_stride(const AttentionHead& h) { return attention_row(h.dim); }

  /// to[dim, padded(seq)] = fromᵀ
  static void transpose_rows(const AttentionHead& h, const Element* from, std::uint32_t* to) {
    transpose_lines(
        units(h.seq), h.dim,
        [&](Count u, Count c, Count left) { return column_units<Dot>(from, h.stride, h.seq, u, c, left); }, to,
        padded(h.seq), units(h.seq));
  }
  /// to[units(dim), sliver] = the transposed rows of up to one sliver of queries, zeros behind them.
  static void pack_queries(const Element* from, Count stride, Count rows, Count dim, std::uint32_t* to) {
    transpose_units(as_units(from), stride / per, rows, dim / per, to, sliver, sliver);
  }
  /// Keys that some query before `end` sees.
  static Count keys_until(const AttentionHead& h, Count end) { return h.causal && end < h.seq ? end : h.seq; }

  struct Forward {
    std::uint32_t *vt, *queries, *weights;
    float *scores, *sums;
    Count bytes;
    Forward(const AttentionHead& h, void* base) {
      Carver carve(base);
      vt = carve.take<std::uint32_t>(h.dim * padded(h.seq));
      queries = carve.take<std::uint32_t>(units(h.dim) * sliver);
      weights = carve.take<std::uint32_t>(units(key_block) * sliver);
      scores = carve.take<float>(key_block * sliver);
      sums = carve.take<float>(h.dim * sliver);
      bytes = carve.used();
    }
  };

  static Count forward_scratch(const AttentionHead& h) { return Forward(h, nullptr).bytes; }

  /// Scales, masks and exponentiates one register column of scores[keys, sliver] and writes it as weights; returns the factor
  /// for what was summed before.
  SHERD_INLINE static F weigh(const AttentionHead& h, Count q0, Count k0, Count keys, float* scores,
                              std::uint32_t* weights, Keeper& keeper, F& top, F& total) {
    const I query = lane_indices(q0);
    F high = top;
    for (Count r = 0; r < keys; ++r) {
      F x = load(scores + r * sliver) * h.scale;
      if (h.causal && k0 + r > q0) x = query >= static_cast<std::int32_t>(k0 + r) ? x : all(very_low);
      store(scores + r * sliver, x);
      high = max(x, high);
    }
    const F fade = exp(top - high);
    F sum{};
    for (Count r = 0; r < keys; r += per) {
      F p[2]{};
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        if (r + i >= keys) continue;
        p[i] = exp(load(scores + (r + i) * sliver) - high);
        sum = sum + p[i];
        if (h.threshold) p[i] = keeper.keeps(k0 + r + i) ? p[i] * h.factor : F{};
      }
      store_as(weights + r / per * sliver, Dot::unit(p[0], p[1]));
    }
    top = high;
    total = total * fade + sum;
    return fade;
  }

  static void forward(const AttentionHead& h, float* out, float* lse, void* scratch) {
    const Forward s(h, scratch);
    const auto* k = static_cast<const Element*>(h.k);
    transpose_rows(h, static_cast<const Element*>(h.v), s.vt);
    for (Count q0 = 0; q0 < h.seq; q0 += sliver) {
      const Count queries = h.seq - q0 < sliver ? h.seq - q0 : sliver, all_keys = keys_until(h, q0 + queries);
      pack_queries(static_cast<const Element*>(h.q) + q0 * h.stride, h.stride, queries, h.dim, s.queries);
      F top[2] = {all(very_low), all(very_low)}, total[2] = {};
      Keeper keepers[2] = {Keeper(h, q0), Keeper(h, q0 + lanes)};
      for (Count k0 = 0; k0 < all_keys; k0 += key_block) {
        const Count keys = all_keys - k0 < key_block ? all_keys - k0 : key_block;
        multiply_sliver<Dot>(k + k0 * h.stride, h.stride / per, keys, s.queries, units(h.dim), s.scores, sliver, false);
        F fade[2];
        for (int part = 0; part < 2; ++part)
          fade[part] = weigh(h, q0 + part * lanes, k0, keys, s.scores + part * lanes, s.weights + part * lanes,
                             keepers[part], top[part], total[part]);
        if (k0 > 0)
          for (Count d = 0; d < h.dim; ++d)
            for (int part = 0; part < 2; ++part)
              store(s.sums + d * sliver + part * lanes, load(s.sums + d * sliver + part * lanes) * fade[part]);
        multiply_sliver<Dot>(s.vt + k0 / per, padded(h.seq), h.dim, s.weights, units(keys), s.sums, sliver, k0 > 0);
      }
      write_out(h, s.sums, top, total, queries, out + q0 * out_stride(h), lse + q0);
    }
  }

  static void write_out(const AttentionHead& h, const float* sums, const F (&top)[2], const F (&total)[2], Count queries,
                        float* out, float* lse) {
    const F inverse[2] = {1.0f / total[0], 1.0f / total[1]};
    transpose_lines(
        h.dim, queries,
        [&](Count d, Count lane, Count) { return (U)(load(sums + d * sliver + lane) * inverse[lane / lanes]); },
        reinterpret_cast<std::uint32_t*>(out), out_stride(h), h.dim);
    for (Count i = 0; i < queries; ++i)
      lse[i] = top[i / lanes][i % lanes] + __builtin_logf(total[i / lanes][i % lanes]);
  }

  static constexpr int slivers = 2;
  static constexpr Count query_block = slivers * sliver;

  struct Backward {
    std::uint32_t *kt, *queries[slivers], *douts[slivers], *query_columns, *dout_columns, *gradients[slivers];
    float *scores, *products, *dq[slivers];
    Element *weight_rows, *gradient_rows;
    Count bytes;
    Backward(const AttentionHead& h, void* base) {
      Carver carve(base);
      kt = carve.take<std::uint32_t>(h.dim * padded(h.seq));
      query_columns = carve.take<std::uint32_t>(units(query_block) * ceil_to(h.dim, sliver));
      dout_columns = carve.take<std::uint32_t>(units(query_block) * ceil_to(h.dim, sliver));
      for (int s = 0; s < slivers; ++s) {
        queries[s] = carve.take<std::uint32_t>(units(h.dim) * sliver);
        douts[s] = carve.take<std::uint32_t>(units(h.dim) * sliver);
        gradients[s] = carve.take<std::uint32_t>(units(key_block) * sliver);
        dq[s] = carve.take<float>(h.dim * sliver);
      }
      scores = carve.take<float>(key_block * sliver);
      products = carve.take<float>(key_block * sliver);
      weight_rows = carve.take<Element>(key_block * query_block);
      gradient_rows = carve.take<Element>(key_block * query_block);
      bytes = carve.used();
    }
  };

  static Count backward_scratch(const AttentionHead& h) { return Backward(h, nullptr).bytes; }

  /// Turns one register column of scores and of dout·v into weights and score gradients, in both orientations. Rows from
  /// `keys` to `block_keys` are masked for these queries.
  SHERD_INLINE static void differentiate(const AttentionHead& h, Count q0, Count k0, Count keys, Count block_keys,
                                         const float* scores, const float* products, F lse, F delta, Keeper& keeper,
                                         Element* weight_rows, Element* gradient_rows, std::uint32_t* gradients) {
    const I query = lane_indices(q0);
    for (Count r = 0; r < block_keys; r += per) {
      F g[2]{};
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        const Count row = r + i;
        F p{};
        if (row < keys) {
          p = exp(load(scores + row * sliver) * h.scale - lse);
          if (h.causal && k0 + row > q0) p = query >= static_cast<std::int32_t>(k0 + row) ? p : F{};
          F dp = load(products + row * sliver), kept = p;
          if (h.threshold) {
            const I keep = keeper.keeps(k0 + row);
            dp = keep ? dp * h.factor : F{};
            kept = keep ? p * h.factor : F{};
          }
          g[i] = p * (dp - delta) * h.scale;
          p = kept;
        }
        if (row >= block_keys) continue;
        Dot::store(weight_rows + row * query_block, p);
        Dot::store(gradient_rows + row * query_block, g[i]);
      }
      if (r < keys) store_as(gradients + r / per * sliver, Dot::unit(g[0], g[1]));
    }
  }

  /// The first `n` values, and `padding` behind them.
  static F load_lanes(const float* from, Count n, float padding) {
    F out = all(padding);
    for (int l = 0; l < lanes && l < n; ++l) out[l] = from[l];
    return out;
  }

  static void backward(const AttentionHead& h, const float* lse, const float* delta, float* dq, float* dk, float* dv,
                       void* scratch) {
    const Backward s(h, scratch);
    const Count width = out_stride(h);
    transpose_rows(h, static_cast<const Element*>(h.k), s.kt);
    for (Count q0 = 0; q0 < h.seq; q0 += query_block) {
      const Count queries = h.seq - q0 < query_block ? h.seq - q0 : query_block;
      prepare_queries(h, s, q0, queries);
      const Count all_keys = keys_until(h, q0 + queries);
      for (Count k0 = 0; k0 < all_keys; k0 += key_block) {
        const Count keys = all_keys - k0 < key_block ? all_keys - k0 : key_block;
        for (int i = 0; i < slivers; ++i) backward_tile(h, s, i, q0, k0, keys, lse, delta);
        for (Count d = 0; d < h.dim; d += sliver) {
          const Count at = d * units(query_block);
          multiply_sliver<Dot>(s.weight_rows, units(query_block), keys, s.dout_columns + at, units(query_block),
                               dv + k0 * width + d, width, true);
          multiply_sliver<Dot>(s.gradient_rows, units(query_block), keys, s.query_columns + at, units(query_block),
                               dk + k0 * width + d, width, true);
        }
      }
      for (int i = 0; i < slivers && i * sliver < queries; ++i)
        transpose_units(reinterpret_cast<const std::uint32_t*>(s.dq[i]), sliver, h.dim,
                        queries - i * sliver < sliver ? queries - i * sliver : sliver,
                        reinterpret_cast<std::uint32_t*>(dq + (q0 + i * sliver) * width), width, h.dim);
    }
  }

  static void prepare_queries(const AttentionHead& h, const Backward& s, Count q0, Count queries) {
    const Element* q = static_cast<const Element*>(h.q) + q0 * h.stride;
    const Element* dout = static_cast<const Element*>(h.dout) + q0 * h.dout_stride;
    for (int i = 0; i < slivers; ++i) {
      const Count from = i * sliver, left = queries - from, rows = left < 0 ? 0 : left < sliver ? left : sliver;
      pack_queries(q + (rows ? from * h.stride : 0), h.stride, rows, h.dim, s.queries[i]);
      pack_queries(dout + (rows ? from * h.dout_stride : 0), h.dout_stride, rows, h.dim, s.douts[i]);
      for (Count at = 0; at < h.dim * sliver; at += lanes) store(s.dq[i] + at, F{});
    }
    pack_block(q, h.stride, queries, h.dim, s.query_columns);
    pack_block(dout, h.dout_stride, queries, h.dim, s.dout_columns);
  }

  /// pack_columns over a whole query block: rows past `queries` are zeros.
  static void pack_block(const Element* from, Count stride, Count queries, Count dim, std::uint32_t* to) {
    for (Count first = 0; first < dim; first += sliver, to += units(query_block) * sliver)
      for (Count u = 0; u < units(query_block); ++u)
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
          const Count c = first + part * lanes;
          store_as(to + u * sliver + part * lanes,
                   c < dim && u * per < queries ? column_units<Dot>(from, stride, queries, u, c, dim - c) : U{});
        }
  }

  static void backward_tile(const AttentionHead& h, const Backward& s, int i, Count q0, Count k0, Count block_keys,
                            const float* lse, const float* delta) {
    const Count first = q0 + i * sliver;
    Count keys = keys_until(h, first + sliver) - k0;
    keys = keys < 0 || first >= h.seq ? 0 : keys < block_keys ? keys : block_keys;
    multiply_sliver<Dot>(static_cast<const Element*>(h.k) + k0 * h.stride, h.stride / per, keys, s.queries[i],
                         units(h.dim), s.scores, sliver, false);
    multiply_sliver<Dot>(static_cast<const Element*>(h.v) + k0 * h.stride, h.stride / per, keys, s.douts[i],
                         units(h.dim), s.products, sliver, false);
    for (int part = 0; part < 2; ++part) {
      const Count q = first + part * lanes;
      Keeper keeper(h, q);
      differentiate(h, q, k0, keys, block_keys, s.scores + part * lanes, s.products + part * lanes,
                    load_lanes(lse + q, h.seq - q, -very_low), load_lanes(delta + q, h.seq - q, 0), keeper,
                    s.weight_rows + i * sliver + part * lanes, s.gradient_rows + i * sliver + part * lanes,
                    s.gradients[i] + part * lanes);
    }
    if (keys > 0)
      multiply_sliver<Dot>(s.kt + k0 / per, padded(h.seq), h.dim, s.gradients[i], units(keys), s.dq[i], sliver, true);
  }

  static float dot(const float* a, const float* b, Count n) {
    F sum{};
    for (Count i = 0; i < n; i += lanes)
      sum = sum + (i + lanes <= n ? load(a + i) * load(b + i) : load_lanes(a + i, n - i, 0) * load_lanes(b + i, n - i, 0));
    float total = 0;
    for (int l = 0; l < lanes; ++l) total += sum[l];
    return total;
  }

  static constexpr AttentionOps ops() { return {forward_scratch, backward_scratch, forward, backward, dot}; }
};

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
