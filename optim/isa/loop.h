#pragma once

#include "optim/isa/noise.h"
#include "optim/isa/streams.h"
#include "optim/isa/tables.h"

// The loop around the update rules (optim/rules).

namespace sherd::optim::SHERD_ISA {
namespace {

/// The streams of one loop: P is the storage type of the parameter (float: masters alone, Split: split
/// masters), M that of the rule's states. A chunk says the gradient's.
template <class P_, class M_, class Rule>
struct Streams {
  using P = P_;
  using M = M_;
  static constexpr int moments = Rule::state_count, watched = Rule::watched;
  static constexpr bool rounded = moments > 0 && same_type<M, Bf16>;
  static constexpr bool split = rounded;  // the order of elements in a Pair
  static constexpr bool has_master = !same_type<P, Split>;
  static constexpr bool has_param = !same_type<P, float>;
};

/// Functions that rules take from here.
struct Math {
  SHERD_INLINE static F root(F x) {
#if defined(SHERD_ISA_avx512)
    return (F)_mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), (__m512)x);  // GCC 12 warns of the plain one
#elif defined(SHERD_ISA_avx2)
    return (F)_mm256_sqrt_ps((__m256)x);
#else
    return (F)_mm_sqrt_ps((__m128)x);
#endif
  }
};

struct Values {
  Pair weight, grad, first, second;
};

SHERD_INLINE U magnitude(F x) {
  return (U)x & 0x7fffffffu;
}
SHERD_INLINE U larger(U a, U b) {
  const I x = (I)a, y = (I)b;  // magnitudes fit the signed range, and it has an instruction
  return (U)(x > y ? x : y);
}

SHERD_INLINE std::uint32_t largest(U v) {
  std::uint32_t out = 0;
  for (int i = 0; i < lanes; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

struct Tops {
  U weight{}, moment{};
  SHERD_INLINE void see(U& top, Pair x) { top = larger(top, larger(magnitude(x.a), magnitude(x.b))); }
};

/// Fetches a turn's elements of one stream.
template <class T>
SHERD_INLINE void fetch(const void* base, std::int64_t i) {
  const char* from = static_cast<const char*>(base) + i * static_cast<std::int64_t>(sizeof(T));
#pragma GCC unroll 4
  for (std::size_t k = 0; k < turn * sizeof(T); k += 64) _mm_prefetch(from + k, _MM_HINT_T0);
}

// How far ahead to fetch, in elements: hides the latency of memory better than the hardware does across so
// many streams.
constexpr std::int64_t ahead = 128;

/// A turn's gradients. The type is asked for at each turn: beside memory that costs nothing, and it spares
/// two loops of three.
template <bool split>
SHERD_INLINE Pair read_gradient(const SpanChunk& c, std::int64_t i) {
  if (c.grad_type == grad_bf16) return read<split>(static_cast<const Bf16*>(c.grad) + i);
  if (c.grad_type == grad_f16) return read<split>(static_cast<const F16*>(c.grad) + i);
  return read<split>(static_cast<const float*>(c.grad) + i);
}

/// Bytes of one.
SHERD_INLINE std::int64_t gradient_size(const SpanChunk& c) {
  return c.grad_type == grad_f32 ? sizeof(float) : sizeof(Bf16);
}

SHERD_INLINE const char* gradient_at(const SpanChunk& c, std::int64_t i) {
  return static_cast<const char*>(c.grad) + i * gradient_size(c);
}

template <class S>
SHERD_INLINE void fetch_ahead(const SpanChunk& c, std::int64_t i) {
  i += ahead;
  fetch<float>(gradient_at(c, i), 0);
  if constexpr (S::has_master) fetch<float>(c.master, i);
  if constexpr (!S::has_master) fetch<Bf16>(c.param, i), fetch<Bf16>(c.low, i);
  if constexpr (S::moments > 0) fetch<typename S::M>(c.first, i);
  if constexpr (S::moments > 1) fetch<typename S::M>(c.second, i);
}

/// One turn at element i.
template <class S, class Rule>
SHERD_INLINE void step(const SpanChunk& c, std::int64_t i, const NoiseAt& noise, Tops& tops,
                       const Rule& rule) {
  using M = typename S::M;
  constexpr bool split = S::split;
  float* master = S::has_master ? c.master + i : nullptr;
  std::uint16_t* low = S::has_master ? nullptr : c.low + i;
  void* param = S::has_param ? static_cast<std::uint16_t*>(c.param) + i : nullptr;
  M* first = static_cast<M*>(c.first) + (S::moments > 0 ? i : 0);
  M* second = static_cast<M*>(c.second) + (S::moments > 1 ? i : 0);
  Values x{};
  x.weight = read_master<split, typename S::P>(master, param, low);
  x.grad = read_gradient<split>(c, i);
  if constexpr (S::moments > 0) x.first = read<split>(first);
  if constexpr (S::moments > 1) x.second = read<split>(second);
  rule(x.weight.a, x.grad.a, x.first.a, x.second.a);
  rule(x.weight.b, x.grad.b, x.first.b, x.second.b);
  if constexpr (S::rounded) {
    write_rounded(first, x.first, noise.bits(0));
    if constexpr (S::moments > 1) write_rounded(second, x.second, noise.bits(1));
  } else {
    if constexpr (S::moments > 0) store_pair<false>(first, x.first);
    if constexpr (S::moments > 1) store_pair<false>(second, x.second);
  }
  write_master<split, typename S::P>(master, param, low, x.weight, c.stream);
  tops.see(tops.weight, x.weight);
  if constexpr (S::moments > 0) tops.see(tops.moment, S::watched == 0 ? x.first : x.second);
}

/// Fewer elements than a turn takes: a copy of them, filled up with elements that stay finite under any rule.
template <class S>
struct Tail {
  alignas(64) float master[turn] = {};
  alignas(64) std::uint16_t low[turn] = {}, param[turn] = {};
  alignas(64) char grad[turn * sizeof(float)] = {};
  alignas(64) typename S::M first[turn], second[turn];

  SHERD_INLINE Tail(const SpanChunk& c, std::int64_t i, std::int64_t n) {
    const Pair ones{all(1.0f), all(1.0f)};  // no 0/0, whatever eps is
    store_pair<false>(first, ones), store_pair<false>(second, ones);
    each(c, i, [n](auto* mine, const auto* theirs) SHERD_ALWAYS {
      __builtin_memcpy(mine, theirs, static_cast<std::size_t>(n) * sizeof *mine);
    });
    __builtin_memcpy(grad, gradient_at(c, i), static_cast<std::size_t>(n * gradient_size(c)));
  }
  SHERD_INLINE SpanChunk chunk(const SpanChunk& c) {
    SpanChunk mine = c;
    mine.master = master, mine.low = low, mine.param = param, mine.grad = grad;
    mine.first = first, mine.second = second, mine.stream = false;
    return mine;
  }
  SHERD_INLINE void put_back(const SpanChunk& c, std::int64_t i, std::int64_t n) {
    each(c, i, [n](const auto* mine, auto* theirs) SHERD_ALWAYS {
      __builtin_memcpy(theirs, mine, static_cast<std::size_t>(n) * sizeof *mine);
    });
  }

 private:
  template <class Copy>
  SHERD_INLINE void each(const SpanChunk& c, std::int64_t i, Copy copy) {
    using M = typename S::M;
    if constexpr (S::has_master) copy(master, c.master + i);
    if constexpr (!S::has_master) copy(low, c.low + i);
    if constexpr (S::has_param) copy(param, static_cast<std::uint16_t*>(c.param) + i);
    if constexpr (S::moments > 0) copy(first, static_cast<M*>(c.first) + i);
    if constexpr (S::moments > 1) copy(second, static_cast<M*>(c.second) + i);
  }
};

/// Elements [begin, end).
template <class S, class Rule>
SHERD_INLINE void stretch(const SpanChunk& c, std::int64_t begin, std::int64_t end, const NoiseAt& noise,
                          Tops& tops, const Rule& rule) {
  std::int64_t i = begin;
  for (; i + turn <= end; i += turn) {
    fetch_ahead<S>(c, i);
    step<S>(c, i, noise.right(i - begin), tops, rule);
  }
  if (i == end) return;
  Tail<S> tail(c, i, end - i);
  step<S>(tail.chunk(c), 0, noise.right(i - begin), tops, rule);
  tail.put_back(c, i, end - i);
}

/// The same row by row of the tiles of noise.
template <class S, class Rule>
SHERD_INLINE void noisy_stretch(const SpanChunk& c, Tops& tops, const Rule& rule) {
  const RoundKeys keys(c.noise_seed);
  Noise noise;
  std::int64_t i = 0, tile = -1;
  while (i < c.n) {
    const std::int64_t element = c.first_element + i;
    if (tile != element / Noise::tile) {
      tile = element / Noise::tile;
      noise.draw(keys, c.noise_stream, static_cast<std::uint64_t>(tile));
    }
    const NoiseAt at{&noise, element / Noise::side % Noise::side, element % Noise::side};
    const std::int64_t row_end = i + Noise::side - at.column, end = row_end < c.n ? row_end : c.n;
    if (end - i == Noise::side) {
#pragma GCC unroll 2
      for (int k = 0; k < Noise::side; k += turn) {
        fetch_ahead<S>(c, i + k);
        step<S>(c, i + k, at.right(k), tops, rule);
      }
    } else {
      stretch<S>(c, i, end, at, tops, rule);
    }
    i = end;
  }
}

/// Steps every register of the chunk, two at a time.
template <class S, class Rule>
SHERD_INLINE Extremes run(const SpanChunk& c, const Rule& given) {
  const Rule rule = given;  // copies, which no store can alias
  const float factor = c.factor;
  const auto step = [&](F& p, F g, F& first, F& second)
                        SHERD_ALWAYS { step_element(rule, Math{}, p, g * factor, first, second); };
  Tops tops;
  if constexpr (S::rounded)
    noisy_stretch<S>(c, tops, step);
  else
    stretch<S>(c, 0, c.n, {}, tops, step);
  if (c.stream) _mm_sfence();
  return {largest(tops.weight), largest(tops.moment)};
}

}  // namespace
}  // namespace sherd::optim::SHERD_ISA
