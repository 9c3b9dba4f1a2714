#include "optim/isa/loop.h"
#include "optim/isa/tables.h"

// Elements are taken by 64, whose signs are a word. What is left at the end is done to a copy that zeros fill
// up, which add nothing to any sum.

namespace sherd::optim::SHERD_ISA {
namespace {

constexpr int block = 64;
/// Elements that packing fetches ahead: it has few streams, and they go by quickly.
constexpr std::int64_t packing_ahead = 512;

/// One bit for each lane of x that is below 0.
SHERD_INLINE std::uint64_t negative(F x) {
#if defined(SHERD_ISA_avx512)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)F{}, _CMP_LT_OQ);
#elif defined(SHERD_ISA_avx2)
  const I below = x < F{};
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)below));
#else
  const I below = x < F{};
  return static_cast<std::uint32_t>(_mm_movemask_ps((__m128)below));
#endif
}

/// scale, negative where the lane's bit is set, for the lanes from bit `at` on.
SHERD_INLINE F signed_by(std::uint64_t word, int at, float scale) {
#if defined(SHERD_ISA_avx512)
  return (F)_mm512_mask_blend_ps(static_cast<__mmask16>(word >> at), (__m512)all(scale), (__m512)all(-scale));
#else
  U bit;
  for (int i = 0; i < lanes; ++i) bit[i] = 1u << i;
  const I set = (all(static_cast<std::uint32_t>(word >> at)) & bit) != 0u;
  return set ? all(-scale) : all(scale);
#endif
}

template <class T>
struct Copy {
  alignas(64) T values[block] = {};
  SHERD_INLINE Copy(const T* from, std::int64_t n) {
    __builtin_memcpy(values, from, static_cast<std::size_t>(n) * sizeof(T));
  }
  SHERD_INLINE void put_back(T* to, std::int64_t n) const {
    __builtin_memcpy(to, values, static_cast<std::size_t>(n) * sizeof(T));
  }
};

struct Momentum {
  float factor, beta, one_minus_beta;
};

template <class G>
SHERD_INLINE SumD8 compress_block(const Momentum& rule, const G* grad, const float* momentum, float* error,
                                  std::uint64_t& signs) {
  SumD8 sum;
  std::uint64_t word = 0;
#pragma GCC unroll 16
  for (int k = 0; k < block; k += lanes) {
    const F m = rule.beta * load(momentum + k) + rule.one_minus_beta * (load(grad + k) * rule.factor);
    const F x = m + load(error + k);
    store(error + k, x);
    add_squares(x, k, sum);
    word |= negative(x) << k;
  }
  signs = word;
  return sum;
}

template <class G>
void compress(const void* grads, float factor, float beta, float one_minus_beta, const float* momentum,
              float* error, std::uint64_t* signs, double* squares, std::int64_t n) {
  const G* grad = static_cast<const G*>(grads);
  const Momentum rule{factor, beta, one_minus_beta};
  std::int64_t i = 0;
  for (; i + sums_at_once * block <= n; i += sums_at_once * block) {
    SumD8 sums[sums_at_once];
#pragma GCC unroll 8
    for (int b = 0; b < sums_at_once; ++b) {
      const std::int64_t at = i + b * block;
      for (int k = 0; k < block; k += turn)
        fetch<G>(grad, at + packing_ahead + k), fetch<float>(momentum, at + packing_ahead + k),
            fetch<float>(error, at + packing_ahead + k);
      sums[b] = compress_block(rule, grad + at, momentum + at, error + at, *signs++);
    }
    store_totals(sums, squares);
    squares += sums_at_once;
  }
  for (; i + block <= n; i += block)
    *squares++ = compress_block(rule, grad + i, momentum + i, error + i, *signs++).total();
  if (i == n) return;
  const Copy<G> g(grad + i, n - i);
  const Copy<float> m(momentum + i, n - i);
  Copy<float> e(error + i, n - i);
  *squares = compress_block(rule, g.values, m.values, e.values, *signs).total();
  e.put_back(error + i, n - i);
}

SHERD_INLINE double average_block(const std::uint64_t* const* signs, const float* scales, int count,
                                  std::int64_t at, float* error, std::uint64_t& result) {
  const float part = 1.0f / static_cast<float>(count);
  SumD8 sum;
  std::uint64_t word = 0;
  for (int k = 0; k < block; k += lanes) {
    F all_of_them{};
    for (int i = 0; i < count; ++i) all_of_them = all_of_them + signed_by(signs[i][at], k, scales[i]);
    const F y = all_of_them * part + load(error + k);
    store(error + k, y);
    add_squares(y, k, sum);
    word |= negative(y) << k;
  }
  result = word;
  return sum.total();
}

/// Clears the elements that a last block which is not full does not have.
SHERD_INLINE void clear_after(float* x, std::int64_t n) {
  for (std::int64_t i = n; i < block; ++i) x[i] = 0;
}

void average(const std::uint64_t* const* signs, const float* scales, int count, float* error,
             std::uint64_t* result, double* squares, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + block <= n; i += block)
    *squares++ = average_block(signs, scales, count, i / block, error + i, *result++);
  if (i == n) return;
  Copy<float> e(error + i, n - i);
  average_block(signs, scales, count, i / block, e.values, *result);
  clear_after(e.values, n - i);
  SumD8 sum;
  for (int k = 0; k < block; k += lanes) add_squares(load(e.values + k), k, sum);
  *squares = sum.total();
  e.put_back(error + i, n - i);
}

SHERD_INLINE F settled(F error, float scale) {
  const I below = error < F{};
  return error - (below ? all(-scale) : all(scale));
}

void settle(float* error, float scale, std::int64_t n) {
  map([&](F e) SHERD_ALWAYS { return settled(e, scale); }, n, error, error);
}

/// The agreed momentum, which a turn of the update has beside the chunk.
struct Agreed {
  const std::uint64_t* signs;
  float scale;
  float* error;
  float settled;
};

/// Past the caches where it can be: it was not read, and is not soon to be.
SHERD_INLINE void write_momentum(float* to, Pair m) {
  if (reinterpret_cast<std::uintptr_t>(to) % 64 != 0) return store_pair<false>(to, m);
#if defined(SHERD_ISA_avx512)
  _mm512_stream_ps(to, (__m512)m.a), _mm512_stream_ps(to + lanes, (__m512)m.b);
#elif defined(SHERD_ISA_avx2)
  _mm256_stream_ps(to, (__m256)m.a), _mm256_stream_ps(to + lanes, (__m256)m.b);
#else
  _mm_stream_ps(to, (__m128)m.a), _mm_stream_ps(to + lanes, (__m128)m.b);
#endif
}

/// One register at element i.
SHERD_INLINE F step_register(const OneBitAdam& rule, const Agreed& agreed, std::int64_t i, F weight, F& m,
                             F v) {
  const F e = load(agreed.error + i);
  const I varies = v > F{};
  store(agreed.error + i, varies ? settled(e, agreed.settled) : F{});
  const F sent = signed_by(agreed.signs[i / block], static_cast<int>(i % block), agreed.scale);
  rule(Math{}, weight, sent, m, v);
  return weight;
}

template <class S>
SHERD_INLINE void step_agreed(const SpanChunk& c, std::int64_t i, const OneBitAdam& rule,
                              const Agreed& agreed, Tops& tops) {
  float* master = S::has_master ? c.master + i : nullptr;
  std::uint16_t* low = S::has_master ? nullptr : c.low + i;
  void* param = S::has_param ? static_cast<std::uint16_t*>(c.param) + i : nullptr;
  Pair weight = read_master<false, typename S::P>(master, param, low), m{};
  const Pair v = load_pair<false>(static_cast<const float*>(c.second) + i);
  weight.a = step_register(rule, agreed, i, weight.a, m.a, v.a);
  weight.b = step_register(rule, agreed, i + lanes, weight.b, m.b, v.b);
  write_momentum(static_cast<float*>(c.first) + i, m);
  write_master<false, typename S::P>(master, param, low, weight, c.stream);
  tops.see(tops.weight, weight);
  tops.see(tops.moment, m);
}

template <class P>
Extremes update(const SpanChunk& c, const void* given, float* error, float settled) {
  using S = Streams<P, float, OneBitAdam>;
  const OneBitAdam rule = *static_cast<const OneBitAdam*>(given);
  Agreed agreed{static_cast<const std::uint64_t*>(c.grad), c.factor, error, settled};
  Tops tops;
  std::int64_t i = 0;
  for (; i + turn <= c.n; i += turn) {
    fetch<float>(error, i + ahead);
    fetch<float>(c.second, i + ahead);
    if constexpr (S::has_master) fetch<float>(c.master, i + ahead);
    step_agreed<S>(c, i, rule, agreed, tops);
  }
  if (i < c.n) {
    const std::int64_t n = c.n - i;
    SpanChunk rest = c;
    rest.grad = error, rest.grad_type = grad_f32;  // any memory: a tail copies a gradient, too
    Tail<S> tail(rest, i, n);
    Copy<float> errors(error + i, n);
    const std::uint64_t signs = agreed.signs[i / block] >> (i % block);
    agreed.signs = &signs, agreed.error = errors.values;
    step_agreed<S>(tail.chunk(rest), 0, rule, agreed, tops);
    tail.put_back(rest, i, n);
    errors.put_back(error + i, n);
  }
  _mm_sfence();
  return {largest(tops.weight), largest(tops.moment)};
}

/// Where a register's new momentum comes from, at element i of a run, before that of the step is taken.
template <class G>
struct FromGradients {
  SHERD_INLINE static F at(const FrozenLamb& rule, const FrozenRun& run, std::int64_t i, F m, F) {
    return rule.beta1 * m + rule.one_minus_beta1 * (load(static_cast<const G*>(run.source) + i) * run.factor);
  }
};
struct FromSigns {
  SHERD_INLINE static F at(const FrozenLamb&, const FrozenRun& run, std::int64_t i, F, F v) {
    const I varies = v > F{};
    store(run.error + i, varies ? settled(load(run.error + i), run.settled) : F{});
    const std::uint64_t word = static_cast<const std::uint64_t*>(run.source)[i / block];
    return signed_by(word, static_cast<int>(i % block), run.factor);
  }
};

/// 64 elements from `i` on.
template <class Source>
SHERD_INLINE F refresh_block(const FrozenLamb& rule, const FrozenRun& run, std::int64_t i, F top) {
  SumD8 directions, updates;
  for (int k = 0; k < block; k += lanes) {
    const std::int64_t at = i + k;
    F m = load(run.momentum + at), fresh = load(run.fresh_before + at), direction, update, ratio;
    const F v = load(run.variance + at), sent = Source::at(rule, run, at, m, v);
    rule(Math{}, load(run.weight + at), sent, m, v, fresh, direction, update, ratio);
    store(run.momentum + at, m);
    store(run.fresh + at, fresh);
    add_squares(direction, k, directions);
    add_squares(update, k, updates);
    const I above = ratio > top;
    top = above ? ratio : top;
  }
  run.direction[i / block] = directions.total();
  run.update[i / block] = updates.total();
  return top;
}

/// A last block that is not full: a copy, filled up with elements of infinite variances. Their direction and
/// update are 0 whatever the signs and eps are, and their ratio is above none.
template <class Source, class S>
SHERD_INLINE F refresh_rest(const FrozenLamb& rule, const FrozenRun& run, std::int64_t i, F top,
                            const S* source, std::int64_t in_source) {
  const std::int64_t n = run.n - i;
  const Copy<S> from(source, in_source);
  Copy<float> momentum(run.momentum + i, n), fresh(run.fresh_before + i, n);
  Copy<float> variance(run.variance + i, n), error(run.error ? run.error + i : run.momentum + i, n);
  const Copy<float> weight(run.weight + i, n);
  for (std::int64_t k = n; k < block; ++k) variance.values[k] = fresh.values[k] = __builtin_inff();
  FrozenRun rest = run;
  rest.source = from.values, rest.error = error.values, rest.momentum = momentum.values;
  rest.variance = variance.values, rest.weight = weight.values;
  rest.fresh_before = rest.fresh = fresh.values;
  rest.direction += i / block, rest.update += i / block;
  top = refresh_block<Source>(rule, rest, 0, top);
  momentum.put_back(run.momentum + i, n), fresh.put_back(run.fresh + i, n);
  if (run.error) error.put_back(run.error + i, n);
  return top;
}

template <class Source, class S>
float refresh(const FrozenLamb& given, const FrozenRun& run) {
  const FrozenLamb rule = given;
  constexpr bool signs = same_type<S, std::uint64_t>;
  F top{};
  std::int64_t i = 0;
  for (; i + block <= run.n; i += block) top = refresh_block<Source>(rule, run, i, top);
  if (i < run.n) {
    const S* source = static_cast<const S*>(run.source);
    top = refresh_rest<Source>(rule, run, i, top, source + (signs ? i / block : i), signs ? 1 : run.n - i);
  }
  float out = 0;
  for (int k = 0; k < lanes; ++k) out = top[k] > out ? top[k] : out;
  return out;
}

}  // namespace

const OneBitTable one_bit_table = {{compress<float>, compress<Bf16>, compress<F16>},
                                   average,
                                   settle,
                                   {update<float>, update<Bf16>, update<F16>, update<Split>},
                                   {refresh<FromGradients<float>, float>, refresh<FromGradients<Bf16>, Bf16>,
                                    refresh<FromGradients<F16>, F16>},
                                   refresh<FromSigns, std::uint64_t>};

}  // namespace sherd::optim::SHERD_ISA
