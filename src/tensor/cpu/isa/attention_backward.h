#pragma once

#include "tensor/cpu/isa/attention_forward.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

template <class Dot>
struct AttentionBackward : AttentionBase<Dot> {
  using Base = AttentionBase<Dot>;
  using Element = typename Base::Element;
  using Base::as_units, Base::keys_from, Base::keys_until, Base::pack_queries, Base::padded, Base::per,
      Base::precise, Base::transpose_rows, Base::units, Base::write_queries;

  static constexpr int slivers = 2;
  static constexpr Count query_block = slivers * sliver;

  struct BackwardScratch {
    std::uint32_t *kt, *queries[slivers], *douts[slivers], *query_columns, *dout_columns, *gradients[slivers];
    float *scores, *products, *delta, *dq[slivers];
    Element *weight_rows, *gradient_rows;
    Count bytes;
    BackwardScratch(const AttentionHead& h, void* base) {
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

  static Count scratch_bytes(const AttentionHead& h) { return BackwardScratch(h, nullptr).bytes; }

  /// Turns one register column of scores and of dout·v into weights and score gradients (but for the scale),
  /// in both orientations. Rows from `keys` to `block_keys` are masked for these queries. `base`:
  /// lse·log2(e).
  SHERD_INLINE static void differentiate(const AttentionHead& h, Count q0, Count k0, Count keys,
                                         Count block_keys, const float* scores, const float* products, F base,
                                         F delta, Keeper& keeper, Element* weight_rows,
                                         Element* gradient_rows, std::uint32_t* gradients) {
    const I query = lane_indices(q0);
    const F slope = all(score_factor(h) * log2_e);
    const SeenRows seen(h, q0, k0, keys);
    for (Count r = 0; r < block_keys; r += per) {
      F p[2]{}, g[2]{};
#pragma GCC unroll 2
      for (int i = 0; i < per; ++i) {
        const Count row = r + i;
        if (row >= keys) continue;
        F score = load(scores + row * sliver);
        if (h.cap > 0) score = score_tanh(h, score);
        p[i] = exp2<precise>(multiply_add(score, slope, -base));
        if (row < seen.begin || row >= seen.end) p[i] = sees(h, query, k0 + row) ? p[i] : F{};
        F dp = load(products + row * sliver), kept = p[i];
        if (h.threshold) {
          const I keep = keeper.keeps(k0 + row);
          dp = keep ? dp * h.factor : F{};
          kept = keep ? p[i] * h.factor : F{};
        }
        g[i] = p[i] * (dp - delta);
        if (h.cap > 0) g[i] = g[i] * (1.0f - score * score);
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

  static void run(const AttentionHead& h, const float* lse, void* dq, Count dq_stride, float* dk, float* dv,
                  void* scratch) {
    const BackwardScratch s(h, scratch);
    const Count width = attention_row(h.dim);
    row_products(h, s.delta);
    transpose_rows(h, static_cast<const Element*>(h.k), s.kt);
    for (Count q0 = 0; q0 < h.seq; q0 += query_block) {
      const Count queries = h.seq - q0 < query_block ? h.seq - q0 : query_block;
      prepare_queries(h, s, q0, queries);
      const Count end = keys_until(h, q0 + queries);
      for (Count k0 = keys_from(h, q0); k0 < end; k0 += key_block) {
        const Count keys = end - k0 < key_block ? end - k0 : key_block;
        for (int i = 0; i < slivers; ++i) backward_tile(h, s, i, q0, k0, keys, lse);
        for (Count d = 0; d < h.dim; d += sliver) {
          const Count at = d * units(query_block);
          multiply_sliver<Dot>(s.weight_rows, units(query_block), keys, s.dout_columns + at,
                               units(query_block), dv + k0 * width + d, width, true);
          multiply_sliver<Dot>(s.gradient_rows, units(query_block), keys, s.query_columns + at,
                               units(query_block), dk + k0 * width + d, width, true);
        }
      }
      const F factor[2] = {all(h.scale), all(h.scale)};
      for (int i = 0; i < slivers && i * sliver < queries; ++i)
        write_queries(h, s.dq[i], factor, queries - i * sliver < sliver ? queries - i * sliver : sliver,
                      static_cast<Element*>(dq) + (q0 + i * sliver) * dq_stride, dq_stride);
    }
  }

  static void prepare_queries(const AttentionHead& h, const BackwardScratch& s, Count q0, Count queries) {
    const Element* q = static_cast<const Element*>(h.q) + q0 * h.stride;
    const Element* dout = static_cast<const Element*>(h.dout) + q0 * h.out_stride;
    for (int i = 0; i < slivers; ++i) {
      const Count from = i * sliver, left = queries - from,
                  rows = left < 0        ? 0
                         : left < sliver ? left
                                         : sliver;
      pack_queries(q + (rows ? from * h.stride : 0), h.stride, rows, h.dim, s.queries[i]);
      pack_queries(dout + (rows ? from * h.out_stride : 0), h.out_stride, rows, h.dim, s.douts[i]);
      for (Count at = 0; at < h.dim * sliver; at += lanes) store(s.dq[i] + at, F{});
    }
    pack_block(q, h.stride, queries, h.dim, s.query_columns);
    pack_block(dout, h.out_stride, queries, h.dim, s.dout_columns);
  }

  /// pack_columns for a whole query block: rows past `queries` are zeros.
  static void pack_block(const Element* from, Count stride, Count queries, Count dim, std::uint32_t* to) {
    if (queries == query_block) return pack_columns<Dot>(from, stride, queries, dim, to, units(query_block));
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

  static void backward_tile(const AttentionHead& h, const BackwardScratch& s, int i, Count q0, Count k0,
                            Count block_keys, const float* lse) {
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
                    load_lanes(lse + q, h.seq - q, -very_low) * log2_e, load_lanes(s.delta + q, h.seq - q, 0),
                    keeper, s.weight_rows + i * sliver + part * lanes,
                    s.gradient_rows + i * sliver + part * lanes, s.gradients[i] + part * lanes);
    }
    if (keys > 0)
      multiply_sliver<Dot>(s.kt + k0 / per, padded(h.seq), h.dim, s.gradients[i], units(keys), s.dq[i],
                           sliver, true);
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
};

/// Both passes by the products of Dot.
template <class Dot>
constexpr AttentionOps attention_ops() {
  using Forward = AttentionForward<Dot>;
  using Backward = AttentionBackward<Dot>;
  return {Forward::scratch_bytes, Backward::scratch_bytes, Forward::run, Backward::run, Backward::store_rows};
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
