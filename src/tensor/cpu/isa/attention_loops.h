#pragma once

#include "tensor/cpu/isa/attention.h"
#include "tensor/cpu/isa/philox.h"
#include "tensor/cpu/isa/tiles.h"

// FlashAttention (Dao et al. 2022) with queries in the lanes: tiles of scores are kept as [keys, queries], so that maxima, sums and
// rescaling go element by element, and the tile becomes the right operand of the next product as it is.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr Count key_block = 128;  ///< keys whose scores are in flight; a multiple of 4, the block of the random stream
constexpr float very_low = -1e30f;
constexpr float log2_e = 0x1.715476p0f;

/// 2^x, 0 where that is no normal number; a NaN stays one. With `precise` within 1 ulp, else within 3e-6 of the value, which is
/// far below what bf16 keeps. (Minimax polynomials on [-1/2, 1/2]. Sherd's common exponential does without fma, for the
/// same bits on every processor; products have no such promise, and this one takes half the time.)
template <bool precise>
SHERD_INLINE F exp2(F x) {
#if defined(SHERD_ISA_avx512)
  const F n = (F)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, 8);
#else
  x = max(all(-127.0f), x);
  const F shifter = all(0x1.8p23f + 127.0f);
  const F z = x + shifter;
  const F n = z - shifter;
#endif
  const F r = x - n;
  F p;
  if constexpr (precise) {
    p = multiply_add(all(0x1.41fbbcp-13f), r, all(0x1.5f3e52p-10f));
    p = multiply_add(p, r, all(0x1.3b2d4cp-7f));
    p = multiply_add(p, r, all(0x1.c6aee8p-5f));
    p = multiply_add(p, r, all(0x1.ebfbdcp-3f));
    p = multiply_add(p, r, all(0x1.62e430p-1f));
  } else {
    p = multiply_add(all(0x1.3a02ccp-7f), r, all(0x1.c9fc46p-5f));
    p = multiply_add(p, r, all(0x1.ec0378p-3f));
    p = multiply_add(p, r, all(0x1.62e12cp-1f));
  }
  p = multiply_add(p, r, all(1.0f));
#if defined(SHERD_ISA_avx512)
  return (F)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  return p * (F)((U)z << 23);
#endif
}

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
  static constexpr bool precise = per == 1;

  static Count units(Count n) { return (n + per - 1) / per; }
  static const std::uint32_t* as_units(const Element* e) { return reinterpret_cast<const std::uint32_t*>(e); }
  /// Units from row to row of a matrix that products read eight rows of at once: not a power of two.
  static Count padded(Count n) { return ceil_to(units(n), 16) + 16; }
  /// to[dim, padded(seq)] = fromᵀ
  static void transpose_rows(const AttentionHead& h, const Element* from, std::uint32_t* to) {
    transpose_lines(
        units(h.seq), h.dim,
        [&]<bool whole>(Count u, Count c, Count left, Whole<whole> is_whole) {
          return column_units<Dot>(from, h.stride, h.seq, u, c, left, is_whole);
        },
        to, padded(h.seq), units(h.seq));
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

  /// Masks and exponentiates one register column of scores[keys, sliver] and writes it as weights; returns the factor for what
  /// was summed before. `top` is the highest score before scaling.
  SHERD_INLINE static F weigh(const AttentionHead& h, Count q0, Count k0, Count keys, float* scores,
                              std::uint32_t* weights, Keeper& keeper, F& top, F& total) {
    const I query = lane_indices(q0);
    F high = top;
    Count r = 0;
    for (const Count seen = h.causal && q0 + 1 - k0 < keys ? q0 + 1 - k0 : keys; r < seen; ++r)
      high = max(load(scores + r * sliver), high);
    for (; r < keys; ++r) {
      const F x = query >= static_cast<std::int32_t>(k0 + r) ? load(scores + r * sliver) : all(very_low);
      store(scores + r * sliver, x);
      high = max(x, high);
    }
    const F slope = all(h.scale * log2_e), base = high * slope;
    const F fade = exp2<precise>(top * slope - base);
    F sum{};
    for (r = 0; r < keys; r += per) {
      F p[2]{};
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        if (r + i >= keys) continue;
        p[i] = exp2<precise>(multiply_add(load(scores + (r + i) * sliver), slope, -base));
        sum = sum + p[i];
        if (h.threshold) p[i] = keeper.keeps(k0 + r + i) ? p[i] * h.factor : F{};
      }
      store_as(weights + r / per * sliver, Dot::unit(Dot::round(p[0], p[1])));
    }
    top = high;
    total = multiply_add(total, fade, sum);
    return fade;
  }

  static void forward(const AttentionHead& h, void* out, float* lse, void* scratch) {
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
      const F inverse[2] = {1.0f / total[0], 1.0f / total[1]};
      write_queries(h, s.sums, inverse, queries, static_cast<Element*>(out) + q0 * h.out_stride, h.out_stride);
      for (Count i = 0; i < queries; ++i)
        lse[q0 + i] = top[i / lanes][i % lanes] * h.scale + __builtin_logf(total[i / lanes][i % lanes]);
    }
  }

  /// Rounds sums[dim, sliver]·factor to elements and writes them as rows of queries.
  static void write_queries(const AttentionHead& h, const float* sums, const F (&factor)[2], Count queries, Element* to,
                            Count to_stride) {
    transpose_lines(
        units(h.dim), queries,
        [&](Count u, Count lane, Count, auto) {
          const float* from = sums + u * per * sliver + lane;
          const F by = factor[lane / lanes];
          return Dot::unit(Dot::round(load(from) * by, per == 1 ? F{} : load(from + sliver) * by));
        },
        reinterpret_cast<std::uint32_t*>(to), to_stride / per, units(h.dim));
  }

  static constexpr int slivers = 2;
  static constexpr Count query_block = slivers * sliver;

  struct Backward {
    std::uint32_t *kt, *queries[slivers], *douts[slivers], *query_columns, *dout_columns, *gradients[slivers];
    float *scores, *products, *delta, *dq[slivers];
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
      delta = carve.take<float>(h.seq);
      scores = carve.take<float>(key_block * sliver);
      products = carve.take<float>(key_block * sliver);
      weight_rows = carve.take<Element>(key_block * query_block);
      gradient_rows = carve.take<Element>(key_block * query_block);
      bytes = carve.used();
    }
  };

  static Count backward_scratch(const AttentionHead& h) { return Backward(h, nullptr).bytes; }

  /// Turns one register column of scores and of dout·v into weights and score gradients (but for the scale), in both
  /// orientations. Rows from `keys` to `block_keys` are masked for these queries. `base`: lse·log2(e).
  SHERD_INLINE static void differentiate(const AttentionHead& h, Count q0, Count k0, Count keys, Count block_keys,
                                         const float* scores, const float* products, F base, F delta, Keeper& keeper,
                                         Element* weight_rows, Element* gradient_rows, std::uint32_t* gradients) {
    const I query = lane_indices(q0);
    const F slope = all(h.scale * log2_e);
    const Count seen = h.causal ? q0 + 1 - k0 : keys;
    for (Count r = 0; r < block_keys; r += per) {
      F p[2]{}, g[2]{};
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        const Count row = r + i;
        if (row >= keys) continue;
        p[i] = exp2<precise>(multiply_add(load(scores + row * sliver), slope, -base));
        if (row >= seen) p[i] = query >= static_cast<std::int32_t>(k0 + row) ? p[i] : F{};
        F dp = load(products + row * sliver), kept = p[i];
        if (h.threshold) {
          const I keep = keeper.keeps(k0 + row);
          dp = keep ? dp * h.factor : F{};
          kept = keep ? p[i] * h.factor : F{};
        }
        g[i] = p[i] * (dp - delta);
        p[i] = kept;
      }
      const auto weights = Dot::round(p[0], p[1]), slopes = Dot::round(g[0], g[1]);
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        Dot::store_row(weight_rows + (r + i) * query_block, weights, i);
        Dot::store_row(gradient_rows + (r + i) * query_block, slopes, i);
      }
      store_as(gradients + r / per * sliver, Dot::unit(slopes));
    }
  }

  /// The first `n` values, and `padding` behind them.
  static F load_lanes(const float* from, Count n, float padding) {
    F out = all(padding);
    for (int l = 0; l < lanes && l < n; ++l) out[l] = from[l];
    return out;
  }

  /// delta[i] = Σ dout·out of row i.
  static void row_products(const AttentionHead& h, float* delta) {
    const auto* out = as_units(static_cast<const Element*>(h.out));
    const auto* dout = as_units(static_cast<const Element*>(h.dout));
    for (Count i = 0; i < h.seq; ++i, out += h.out_stride / per, dout += h.out_stride / per) {
      F sum{};
      for (Count u = 0; u < units(h.dim); u += lanes)
        sum = Dot::dot(sum, load_units(out + u, units(h.dim) - u), load_units(dout + u, units(h.dim) - u));
      delta[i] = 0;
      for (int l = 0; l < lanes; ++l) delta[i] += sum[l];
    }
  }

  static void backward(const AttentionHead& h, const float* lse, void* dq, Count dq_stride, float* dk, float* dv,
                       void* scratch) {
    const Backward s(h, scratch);
    const Count width = attention_row(h.dim);
    row_products(h, s.delta);
    transpose_rows(h, static_cast<const Element*>(h.k), s.kt);
    for (Count q0 = 0; q0 < h.seq; q0 += query_block) {
      const Count queries = h.seq - q0 < query_block ? h.seq - q0 : query_block;
      prepare_queries(h, s, q0, queries);
      const Count all_keys = keys_until(h, q0 + queries);
      for (Count k0 = 0; k0 < all_keys; k0 += key_block) {
        const Count keys = all_keys - k0 < key_block ? all_keys - k0 : key_block;
        for (int i = 0; i < slivers; ++i) backward_tile(h, s, i, q0, k0, keys, lse);
        for (Count d = 0; d < h.dim; d += sliver) {
          const Count at = d * units(query_block);
          multiply_sliver<Dot>(s.weight_rows, units(query_block), keys, s.dout_columns + at, units(query_block),
                               dv + k0 * width + d, width, true);
          multiply_sliver<Dot>(s.gradient_rows, units(query_block), keys, s.query_columns + at, units(query_block),
                               dk + k0 * width + d, width, true);
        }
      }
      const F factor[2] = {all(h.scale), all(h.scale)};
      for (int i = 0; i < slivers && i * sliver < queries; ++i)
        write_queries(h, s.dq[i], factor, queries - i * sliver < sliver ? queries - i * sliver : sliver,
                      static_cast<Element*>(dq) + (q0 + i * sliver) * dq_stride, dq_stride);
    }
  }

  static void prepare_queries(const AttentionHead& h, const Backward& s, Count q0, Count queries) {
    const Element* q = static_cast<const Element*>(h.q) + q0 * h.stride;
    const Element* dout = static_cast<const Element*>(h.dout) + q0 * h.out_stride;
    for (int i = 0; i < slivers; ++i) {
      const Count from = i * sliver, left = queries - from, rows = left < 0 ? 0 : left < sliver ? left : sliver;
      pack_queries(q + (rows ? from * h.stride : 0), h.stride, rows, h.dim, s.queries[i]);
      pack_queries(dout + (rows ? from * h.out_stride : 0), h.out_stride, rows, h.dim, s.douts[i]);
      for (Count at = 0; at < h.dim * sliver; at += lanes) store(s.dq[i] + at, F{});
    }
    pack_block(q, h.stride, queries, h.dim, s.query_columns);
    pack_block(dout, h.out_stride, queries, h.dim, s.dout_columns);
  }

  /// pack_columns for a whole query block: rows past `queries` are zeros.
  static void pack_block(const Element* from, Count stride, Count queries, Count dim, std::uint32_t* to) {
    if (queries == query_block) return pack_columns<Dot>(from, stride, queries, dim, to);
    for (Count first = 0; first < dim; first += sliver, to += units(query_block) * sliver)
      for (Count u = 0; u < units(query_block); ++u)
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
          const Count c = first + part * lanes;
          store_as(to + u * sliver + part * lanes,
                   c < dim && u * per < queries
                       ? column_units<Dot>(from, stride, queries, u, c, dim - c, Whole<false>{})
                       : U{});
        }
  }

  static void backward_tile(const AttentionHead& h, const Backward& s, int i, Count q0, Count k0, Count block_keys,
                            const float* lse) {
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
                    load_lanes(lse + q, h.seq - q, -very_low) * log2_e, load_lanes(s.delta + q, h.seq - q, 0), keeper,
                    s.weight_rows + i * sliver + part * lanes, s.gradient_rows + i * sliver + part * lanes,
                    s.gradients[i] + part * lanes);
    }
    if (keys > 0)
      multiply_sliver<Dot>(s.kt + k0 / per, padded(h.seq), h.dim, s.gradients[i], units(keys), s.dq[i], sliver, true);
  }

  static void store_rows(const float* from, Count rows, Count dim, float factor, void* to, Count to_stride) {
    auto* out = static_cast<Element*>(to);
    for (Count i = 0; i < rows; ++i, from += attention_row(dim), out += to_stride)
      for (Count d = 0; d < dim; d += lanes) {
        const auto rounded = Dot::round(load(from + d) * factor, F{});
        if (d + lanes <= dim) {
          Dot::store_row(out + d, rounded, 0);
          continue;
        }
        Element last[lanes];
        Dot::store_row(last, rounded, 0);
        __builtin_memcpy(out + d, last, static_cast<std::size_t>(dim - d) * sizeof(Element));
      }
  }

  static constexpr AttentionOps ops() { return {forward_scratch, backward_scratch, forward, backward, store_rows}; }
};

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
