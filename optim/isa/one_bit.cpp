#include "optim/isa/streams.h"
#include "optim/isa/tables.h"

// Elements are taken by 64, whose signs are a word. What is left at the end is done to a copy that zeros fill
// up, which add nothing to any sum.

namespace sherd::optim::SHERD_ISA {
namespace {

constexpr int block = 64;

/// One bit for each lane of x that is below 0.
SHERD_INLINE std::uint64_t negative(F x) {
  const I below = x < F{};
#if defined(SHERD_ISA_avx512)
  return _mm512_movepi32_mask((__m512i)below);
#elif defined(SHERD_ISA_avx2)
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)below));
#else
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
SHERD_INLINE double compress_block(const Momentum& rule, const G* grad, const float* momentum, float* error,
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
  return sum.total();
}

template <class G>
void compress(const void* grads, float factor, float beta, float one_minus_beta, const float* momentum,
              float* error, std::uint64_t* signs, double* squares, std::int64_t n) {
  const G* grad = static_cast<const G*>(grads);
  const Momentum rule{factor, beta, one_minus_beta};
  std::int64_t i = 0;
  for (; i + block <= n; i += block) {
    _mm_prefetch(reinterpret_cast<const char*>(grad + i + 8 * block), _MM_HINT_T0);
    *squares++ = compress_block(rule, grad + i, momentum + i, error + i, *signs++);
  }
  if (i == n) return;
  const Copy<G> g(grad + i, n - i);
  const Copy<float> m(momentum + i, n - i);
  Copy<float> e(error + i, n - i);
  *squares = compress_block(rule, g.values, m.values, e.values, *signs);
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

/// Of a last block that is not full, the elements that are not there.
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
  map(
      n, error, [&](F e) SHERD_ALWAYS { return settled(e, scale); }, error);
}

void settle_masked(float* error, const float* variance, float scale, std::int64_t n) {
  const auto masked = [&](F e, F v) SHERD_ALWAYS {
    const I varies = v > F{};
    return varies ? settled(e, scale) : F{};
  };
  map(n, error, masked, error, variance);
}

void expand(const std::uint64_t* signs, float scale, float* out, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + block <= n; i += block, ++signs)
#pragma GCC unroll 16
    for (int k = 0; k < block; k += lanes) store(out + i + k, signed_by(*signs, k, scale));
  for (int k = 0; i + k < n; ++k) out[i + k] = *signs >> k & 1 ? -scale : scale;
}

}  // namespace

const OneBitTable one_bit_table = {
    {compress<float>, compress<Bf16>, compress<F16>}, average, settle, settle_masked, expand};

}  // namespace sherd::optim::SHERD_ISA
