#include "optim/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::optim::SHERD_ISA {
namespace {

using namespace sherd::tensor::cpu::SHERD_ISA;

// On a lambda, SHERD_INLINE stands after the parameters.
#define SHERD_ALWAYS __attribute__((always_inline))

// How far ahead to fetch: hides the latency of memory better than the hardware does across four read streams.
constexpr std::int64_t ahead = 512 / 4;

SHERD_INLINE F square_root(F x) {
#if defined(SHERD_ISA_avx512)
  return (F)_mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), (__m512)x);  // GCC 12 warns of the plain one
#elif defined(SHERD_ISA_avx2)
  return (F)_mm256_sqrt_ps((__m256)x);
#else
  return (F)_mm_sqrt_ps((__m128)x);
#endif
}

SHERD_INLINE U magnitude(F x) {
  return (U)x & 0x7fffffffu;
}
SHERD_INLINE U larger(U a, U b) {
  return (I)a > (I)b ? a : b;
}  // magnitudes fit the signed range

SHERD_INLINE std::uint32_t largest(U v) {
  std::uint32_t out = 0;
  for (int i = 0; i < lanes; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

// Masters round to bf16 to nearest, ties away from zero (base/dtype.h, round_master_to_bf16).
SHERD_INLINE H round_master(Bf16, F p) {
  return narrow(((U)p + 0x8000u) >> 16);
}
SHERD_INLINE H round_master(F16, F p) {
  return to_f16(p);
}

SHERD_INLINE void stream_store(std::uint16_t* to, H value) {
#if defined(SHERD_ISA_avx512)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(SHERD_ISA_avx2)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#else
  store_as(to, value);
#endif
}

// What one register's worth of elements is at; `left` < lanes marks the tail.
template <class G, class P>
struct At {
  const Chunk& chunk;
  std::int64_t i, left;

  SHERD_INLINE bool whole() const { return left >= lanes; }
  template <class S>
  SHERD_INLINE F in(const S* base) const {
    return whole() ? load(base + i) : load_tail(base + i, left);
  }
  SHERD_INLINE F grad() const { return in(static_cast<const G*>(chunk.grad)); }
  SHERD_INLINE void out(float* base, F value) const {
    if (whole())
      store(base + i, value);
    else
      store_tail(base + i, value, left);
  }
  template <bool stream>
  SHERD_INLINE void param(F p) const {
    if constexpr (sizeof(P) == 2) {
      const H value = round_master(P{}, p);
      std::uint16_t* to = static_cast<std::uint16_t*>(chunk.param) + i;
      if (!whole())
        __builtin_memcpy(to, &value, static_cast<std::size_t>(left) * 2);
      else if constexpr (stream)
        stream_store(to, value);
      else
        store_as(to, value);
    }
  }
};

SHERD_INLINE void fetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

template <class G>
SHERD_INLINE void fetch_ahead(const Chunk& c, std::int64_t i, bool first, bool second) {
  constexpr std::int64_t step = 2 * lanes;
  for (std::int64_t k = i + ahead; k < i + ahead + step; k += 16) {
    fetch(c.master + k);
    if (first) fetch(c.first + k);
    if (second) fetch(c.second + k);
    fetch(static_cast<const G*>(c.grad) + k);
  }
}

// Runs rule(at, extremes) over the chunk, two registers a turn.
template <class G, class P, bool stream, class Rule>
SHERD_INLINE Extremes run(const Chunk& c, bool first, bool second, Rule rule) {
  U weight{}, moment{};
  std::int64_t i = 0;
  for (; i + 2 * lanes <= c.n; i += 2 * lanes) {
    fetch_ahead<G>(c, i, first, second);
    rule(At<G, P>{c, i, lanes}, weight, moment);
    rule(At<G, P>{c, i + lanes, lanes}, weight, moment);
  }
  for (; i < c.n; i += lanes) rule(At<G, P>{c, i, c.n - i}, weight, moment);
  if constexpr (stream) _mm_sfence();
  return {largest(weight), largest(moment)};
}

template <class G, class P, bool l2, bool stream>
SHERD_INLINE Extremes adam_loop(const Chunk& c, const AdamScalars& s) {
  return run<G, P, stream>(c, true, true, [&](const At<G, P>& at, U& weight, U& moment) SHERD_ALWAYS {
    F p = at.in(c.master), g = at.grad() * s.factor;
    if constexpr (l2) g = g + s.decay * p;
    const F m = s.beta1 * at.in(c.first) + s.one_minus_beta1 * g;
    const F v = s.beta2 * at.in(c.second) + s.one_minus_beta2 * (g * g);
    const F denominator = square_root(v) * s.root_scale + s.eps;
    if constexpr (!l2) p = p - s.decay * p;
    p = p - s.step_size * (m / denominator);
    at.out(c.first, m);
    at.out(c.second, v);
    at.out(c.master, p);
    at.template param<stream>(p);
    // The tail's padding lanes hold 0/(0·x + eps); with eps 0 that is NaN, which must not count.
    if (at.whole()) {
      weight = larger(weight, magnitude(p)), moment = larger(moment, magnitude(v));
      return;
    }
    for (int lane = 0; lane < at.left; ++lane) {
      const U pm = magnitude(p), vm = magnitude(v);
      weight[lane] = pm[lane] > weight[lane] ? pm[lane] : weight[lane];
      moment[lane] = vm[lane] > moment[lane] ? vm[lane] : moment[lane];
    }
  });
}

template <class G, class P, int mode, bool stream>
SHERD_INLINE Extremes sgd_loop(const Chunk& c, const SgdScalars& s) {
  return run<G, P, stream>(c, mode != sgd_plain, false,
                           [&](const At<G, P>& at, U& weight, U& moment) SHERD_ALWAYS {
                             F p = at.in(c.master), g = at.grad() * s.factor;
                             g = g + s.decay * p;
                             if constexpr (mode != sgd_plain) {
                               const F b = s.momentum * at.in(c.first) + g;
                               at.out(c.first, b);
                               moment = larger(moment, magnitude(b));
                               g = mode == sgd_nesterov ? g + s.momentum * b : b;
                             }
                             p = p - s.lr * g;
                             at.out(c.master, p);
                             at.template param<stream>(p);
                             weight = larger(weight, magnitude(p));
                           });
}

template <class G, class P, bool l2>
Extremes adam(const Chunk& c, const AdamScalars& s) {
  return sizeof(P) == 2 && c.stream ? adam_loop<G, P, l2, true>(c, s) : adam_loop<G, P, l2, false>(c, s);
}

template <class G, class P, int mode>
Extremes sgd(const Chunk& c, const SgdScalars& s) {
  return sgd_loop<G, P, mode, false>(c, s);
}

}  // namespace

#define SHERD_ADAM(G, P) \
  { adam<G, P, false>, adam<G, P, true> }
#define SHERD_SGD(G, P) \
  { sgd<G, P, sgd_plain>, sgd<G, P, sgd_momentum>, sgd<G, P, sgd_nesterov> }
#define SHERD_ROW(RULE, G) \
  { RULE(G, float), RULE(G, Bf16), RULE(G, F16) }

const UpdateTable update_table = {
    {SHERD_ROW(SHERD_ADAM, float), SHERD_ROW(SHERD_ADAM, Bf16), SHERD_ROW(SHERD_ADAM, F16)},
    {SHERD_ROW(SHERD_SGD, float), SHERD_ROW(SHERD_SGD, Bf16), SHERD_ROW(SHERD_SGD, F16)}};

}  // namespace sherd::optim::SHERD_ISA
