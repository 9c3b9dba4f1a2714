#include "bench/suite/limits.h"

#include <bit>

#if defined(__x86_64__)
#include <immintrin.h>

#include <initializer_list>
#endif

namespace sherd::bench {
namespace {

void move_plain(const OptimizerStreams& s, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    const float g = s.g[i] * 1e-6f, p = s.p[i] - g;
    s.m[i] += g;
    s.v[i] += g;
    s.p[i] = p;
    s.p16[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(p) >> 16);
  }
}

#if defined(__x86_64__)
constexpr std::int64_t ahead = 128;  // elements

__attribute__((target("avx2"))) void move_avx2(const OptimizerStreams& s, std::int64_t begin,
                                               std::int64_t end) {
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

__attribute__((target("avx512f,avx512bw"))) void move_avx512(const OptimizerStreams& s, std::int64_t begin,
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

#endif

}  // namespace

void move_streams(const OptimizerStreams& s, std::int64_t begin, std::int64_t end) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    return move_avx512(s, begin, end);
  if (__builtin_cpu_supports("avx2")) return move_avx2(s, begin, end);
#endif
  move_plain(s, begin, end);
}

}  // namespace sherd::bench
