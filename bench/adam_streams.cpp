#include "adam_streams.h"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <initializer_list>

namespace sherd::bench {
namespace {

constexpr std::int64_t ahead = 128;  // elements

__attribute__((target("avx2"))) void move_avx2(const Streams& s, std::int64_t begin, std::int64_t end) {
  const __m256 tiny = _mm256_set1_ps(1e-6f);
  for (std::int64_t i = begin; i < end; i += 16) {
    for (const float* from : {s.p, s.m, s.v, s.g})
      _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead), _MM_HINT_T0);
    __m256i half[2];
    for (int k = 0; k < 2; ++k) {
      const std::int64_t at = i + 8 * k;
      const __m256 g = _mm256_mul_ps(_mm256_loadu_ps(s.g + at), tiny);
      const __m256 p = _mm256_sub_ps(_mm256_loadu_ps(s.p + at), g);
      _mm256_storeu_ps(s.m + at, _mm256_add_ps(_mm256_loadu_ps(s.m + at), g));
      _mm256_storeu_ps(s.v + at, _mm256_add_ps(_mm256_loadu_ps(s.v + at), g));
      _mm256_storeu_ps(s.p + at, p);
      half[k] = _mm256_srli_epi32(_mm256_castps_si256(p), 16);
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xd8);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(s.p16 + i), packed);
  }
  _mm_sfence();
}

__attribute__((target("avx512f,avx512bw"))) void move_avx512(const Streams& s, std::int64_t begin,
                                                             std::int64_t end) {
  const __m512 tiny = _mm512_set1_ps(1e-6f);
  for (std::int64_t i = begin; i < end; i += 32) {
    for (const float* from : {s.p, s.m, s.v, s.g})
      for (int k = 0; k < 32; k += 16)
        _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead + k), _MM_HINT_T0);
    __m512i word[2];
    for (int k = 0; k < 2; ++k) {
      const std::int64_t at = i + 16 * k;
      const __m512 g = _mm512_mul_ps(_mm512_loadu_ps(s.g + at), tiny);
      const __m512 p = _mm512_sub_ps(_mm512_loadu_ps(s.p + at), g);
      _mm512_storeu_ps(s.m + at, _mm512_add_ps(_mm512_loadu_ps(s.m + at), g));
      _mm512_storeu_ps(s.v + at, _mm512_add_ps(_mm512_loadu_ps(s.v + at), g));
      _mm512_storeu_ps(s.p + at, p);
      word[k] = _mm512_castps_si512(p);
    }
    // Even and odd halves side by side: as many bytes, and no shuffle.
    const __m512i packed = _mm512_mask_blend_epi16(0xaaaaaaaa, word[0], word[1]);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(s.p16 + i), packed);
  }
  _mm_sfence();
}

}  // namespace

void move_streams(const Streams& s, std::int64_t begin, std::int64_t end) {
  static const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  wide ? move_avx512(s, begin, end) : move_avx2(s, begin, end);
}

#define SHERD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

SHERD_CLONES void upcast(const std::uint16_t* __restrict from, float* __restrict to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
}

SHERD_CLONES double sum_of_squares(const float* x, std::int64_t n) {
  float sums[64] = {};
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 64; ++k) sums[k] += x[i + k] * x[i + k];
  double total = 0;
  for (const float sum : sums) total += static_cast<double>(sum);
  for (; i < n; ++i) total += static_cast<double>(x[i] * x[i]);
  return total;
}

SHERD_CLONES void scale(float* x, float factor, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
}

SHERD_CLONES void round_to_16(const float* __restrict from, std::uint16_t* __restrict to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    to[i] = static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(from[i]) + 0x8000u) >> 16);
}

SHERD_CLONES void adam_pass(const Streams& s, const AdamConstants& c, std::int64_t begin, std::int64_t end) {
  float* __restrict p = s.p, * __restrict m = s.m, * __restrict v = s.v;
  const float* __restrict g = s.g;
  const AdamConstants k = c;
  for (std::int64_t i = begin; i < end; ++i) {
    const float first = k.beta1 * m[i] + (1 - k.beta1) * g[i];
    const float second = k.beta2 * v[i] + (1 - k.beta2) * (g[i] * g[i]);
    m[i] = first, v[i] = second;
    p[i] = p[i] - k.decay * p[i] - k.step_size * (first / (std::sqrt(second) * k.root_scale + k.eps));
  }
}

}  // namespace sherd::bench
