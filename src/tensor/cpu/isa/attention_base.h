#pragma once

#include "tensor/cpu/isa/attention.h"
#include "tensor/cpu/isa/philox.h"
#include "tensor/cpu/isa/tiles.h"
#include "tensor/cpu/isa/vec_math.h"

// FlashAttention (Dao et al. 2022) with queries in the lanes: tiles of scores are kept as [keys, queries], so
// that maxima, sums and rescaling go element by element, and the tile becomes the right operand of the next
// product as it is.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// Keys whose scores are in flight; a multiple of 4, the block of the random stream.
constexpr Count key_block = 128;
constexpr float very_low = -1e30f;
constexpr float log2_e = 0x1.715476p0f;

/// 2^x, 0 where that is no normal number; a NaN stays one. With `precise` within 1 ulp, else within 3e-6 of
/// the value, which is far below what bf16 keeps. (Minimax polynomials on [-1/2, 1/2]. Sherd's common
/// exponential does without fma, for the same bits on every processor; products have no such promise, and
/// this one takes half the time.)
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
  explicit Carver(void* base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T>
  T* take(Count n) {
    T* out = reinterpret_cast<T*>(base_ + static_cast<std::uintptr_t>(used_));
    used_ += ceil_to(n * static_cast<Count>(sizeof(T)), 64);
    return out;
  }
  Count used() const { return used_; }

 private:
  std::uintptr_t base_;  // an integer, because adding to a null pointer is undefined
  Count used_ = 0;
};

/// The queries q0 + lane of one register.
SHERD_INLINE I lane_indices(Count q0) {
  I out;
#pragma GCC unroll 16
  for (int l = 0; l < lanes; ++l) out[l] = static_cast<std::int32_t>(q0) + l;
  return out;
}

/// Among the keys [k0, k0 + keys) all queries of the register from q0 on see those of the rows [begin, end),
/// none where that is empty.
struct SeenRows {
  Count begin, end;
  SHERD_INLINE SeenRows(const AttentionHead& h, Count q0, Count k0, Count keys) {
    const Count first = h.seen.first(q0 + lanes - 1) - k0, behind = h.seen.end(q0, h.seq) - k0;
    begin = first < 0 ? 0 : first < keys ? first : keys;
    end = behind < keys ? behind : keys;
  }
};
/// All bits set in the lanes whose query sees `key`.
SHERD_INLINE I sees(const AttentionHead& h, I query, Count key) {
  return (query > static_cast<std::int32_t>(key - h.seen.ahead)) &
         (query <= static_cast<std::int32_t>(key + h.seen.behind));
}

/// The factor of the numbers in a tile of scores: of products of queries and keys, or where scores are capped
/// of their tanh, score_tanh().
SHERD_INLINE float score_factor(const AttentionHead& h) {
  return h.cap > 0 ? h.cap : h.scale;
}
SHERD_INLINE F score_tanh(const AttentionHead& h, F product) {
  return tanh(product * (h.scale / h.cap));
}

/// Which scores of the queries of one register dropout keeps, key by key.
class Keeper {
 public:
  Keeper(const AttentionHead& head, Count q0)
      : head_(head), aligned_(head.score_row % 4 == 0 && head.first % 4 == 0) {
    std::uint32_t low[lanes], high[lanes];
    for (int l = 0; l < lanes; ++l) {
      const std::uint64_t index = head.first + static_cast<std::uint64_t>((q0 + l) * head.score_row);
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

/// Geometry and packing that both directions share.
template <class Dot>
struct AttentionBase {
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
        units(h.seq), h.seq / per, h.dim,
        [&]<bool whole>(Count u, Count c, Count left, Whole<whole> is_whole) {
          return column_units<Dot>(from, h.stride, h.seq, u, c, left, is_whole);
        },
        to, padded(h.seq), units(h.seq));
  }
  /// to[units(dim), sliver] = the transposed rows of up to one sliver of queries, zeros behind them.
  static void pack_queries(const Element* from, Count stride, Count rows, Count dim, std::uint32_t* to) {
    transpose_units(as_units(from), stride / per, rows, dim / per, to, sliver, sliver);
  }
  /// Keys [keys_from(q0), keys_until(q0 + n)) are those that some of the queries [q0, q0 + n) see, and a few
  /// before: blocks of keys begin where units, random streams and cache lines do.
  static Count keys_from(const AttentionHead& h, Count q0) { return h.seen.first(q0) / 32 * 32; }
  static Count keys_until(const AttentionHead& h, Count end) { return h.seen.end(end - 1, h.seq); }

  /// Rounds sums[dim, sliver]·factor to elements and writes them as rows of queries.
  static void write_queries(const AttentionHead& h, const float* sums, const F (&factor)[2], Count queries,
                            Element* to, Count to_stride) {
    transpose_lines(
        units(h.dim), h.dim / per, queries,
        [&](Count u, Count lane, Count, auto) {
          const float* from = sums + u * per * sliver + lane;
          const F by = factor[lane / lanes];
          return Dot::unit(Dot::round(load(from) * by, per == 1 ? F{} : load(from + sliver) * by));
        },
        reinterpret_cast<std::uint32_t*>(to), to_stride / per, units(h.dim));
  }
};

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
