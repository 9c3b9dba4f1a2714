#pragma once

#include "tensor/cpu/isa/attention_base.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

template <class Dot>
struct AttentionForward : AttentionBase<Dot> {
  using Base = AttentionBase<Dot>;
  using Element = typename Base::Element;
  using Base::keys_from, Base::keys_until, Base::pack_queries, Base::padded, Base::per, Base::precise,
      Base::transpose_rows, Base::units, Base::write_queries;

  struct ForwardScratch {
    std::uint32_t *vt, *queries, *weights;
    float *scores, *sums;
    Count bytes;
    ForwardScratch(const AttentionHead& h, void* base) {
      Carver carve(base);
      vt = carve.take<std::uint32_t>(h.dim * padded(h.seq));
      queries = carve.take<std::uint32_t>(units(h.dim) * sliver);
      weights = carve.take<std::uint32_t>(units(key_block) * sliver);
      scores = carve.take<float>(key_block * sliver);
      sums = carve.take<float>(h.dim * sliver);
      bytes = carve.used();
    }
  };

  static Count scratch_bytes(const AttentionHead& h) { return ForwardScratch(h, nullptr).bytes; }

  /// Masks and exponentiates one register column of scores[keys, sliver] and writes it as weights; returns
  /// the factor for what was summed before. `top` is the highest score before score_factor().
  SHERD_INLINE static F weigh(const AttentionHead& h, Count q0, Count k0, Count keys, float* scores,
                              std::uint32_t* weights, Keeper& keeper, F& top, F& total) {
    const I query = lane_indices(q0);
    const SeenRows seen(h, q0, k0, keys);
    if (h.cap > 0)
      for (Count row = 0; row < keys; ++row)
        store(scores + row * sliver, score_tanh(h, load(scores + row * sliver)));
    F high = top;
    Count r = 0;
    const auto mask_until = [&](Count end) {
      for (; r < end; ++r) {
        const F x = sees(h, query, k0 + r) ? load(scores + r * sliver) : all(very_low);
        store(scores + r * sliver, x);
        high = max(x, high);
      }
    };
    mask_until(seen.begin);
    for (; r < seen.end; ++r) high = max(load(scores + r * sliver), high);
    mask_until(keys);
    // Where no key was seen yet, masked ones must not stand out either.
    const F slope = all(score_factor(h) * log2_e), base = high == all(very_low) ? F{} : high * slope;
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

  static void run(const AttentionHead& h, void* out, float* lse, void* scratch) {
    const ForwardScratch s(h, scratch);
    const auto* k = static_cast<const Element*>(h.k);
    transpose_rows(h, static_cast<const Element*>(h.v), s.vt);
    for (Count q0 = 0; q0 < h.seq; q0 += sliver) {
      const Count queries = h.seq - q0 < sliver ? h.seq - q0 : sliver, begin = keys_from(h, q0),
                  end = keys_until(h, q0 + queries);
      pack_queries(static_cast<const Element*>(h.q) + q0 * h.stride, h.stride, queries, h.dim, s.queries);
      F top[2] = {all(very_low), all(very_low)}, total[2] = {};
      Keeper keepers[2] = {Keeper(h, q0), Keeper(h, q0 + lanes)};
      for (Count k0 = begin; k0 < end; k0 += key_block) {
        const Count keys = end - k0 < key_block ? end - k0 : key_block;
        multiply_sliver<Dot>(k + k0 * h.stride, h.stride / per, keys, s.queries, units(h.dim), s.scores,
                             sliver, false);
        F fade[2];
        for (int part = 0; part < 2; ++part)
          fade[part] = weigh(h, q0 + part * lanes, k0, keys, s.scores + part * lanes,
                             s.weights + part * lanes, keepers[part], top[part], total[part]);
        if (k0 > begin)
          for (Count d = 0; d < h.dim; ++d)
            for (int part = 0; part < 2; ++part)
              store(s.sums + d * sliver + part * lanes,
                    load(s.sums + d * sliver + part * lanes) * fade[part]);
        multiply_sliver<Dot>(s.vt + k0 / per, padded(h.seq), h.dim, s.weights, units(keys), s.sums, sliver,
                             k0 > begin);
      }
      if (begin >= end)
        for (Count i = 0; i < h.dim * sliver; i += lanes) store(s.sums + i, F{});
      F inverse[2];  // of a query that saw no key: 0
      for (int part = 0; part < 2; ++part) inverse[part] = total[part] == F{} ? F{} : 1.0f / total[part];
      write_queries(h, s.sums, inverse, queries, static_cast<Element*>(out) + q0 * h.out_stride,
                    h.out_stride);
      for (Count i = 0; i < queries; ++i)
        lse[q0 + i] =
            top[i / lanes][i % lanes] * score_factor(h) + __builtin_logf(total[i / lanes][i % lanes]);
    }
  }
};

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
