#include "tensor/cpu/isa/philox.h"
#include "tensor/cpu/isa/tables.h"

// base/random.h's normal_block() for many blocks at once, to the same bits. The formulas are evaluated here
// by plain series in double, which differ from the C library's results by a few units of 1e-16. Rounding to
// float hides that, but for the one value in millions that lies so close to the middle between two floats
// that either might be right: these are left to normal_block().

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr int half_lanes = lanes / 2;
using L = std::int64_t __attribute__((vector_size(4 * lanes)));

SHERD_INLINE D all64(double value) {
  return value - D{};
}

/// Integers of magnitude below 2^51.
SHERD_INLINE D to_double(L i) {
  return (D)(i + 0x4338000000000000) - 0x1.8p52;
}

#if defined(SHERD_ISA_avx512)
SHERD_INLINE D sqrt(D x) {
  return (D)_mm512_maskz_sqrt_pd(0xff, (__m512d)x);
}
SHERD_INLINE HalfF to_float(D x) {
  return (HalfF)_mm512_maskz_cvtpd_ps(0xff, (__m512d)x);
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE D sqrt(D x) {
  return (D)_mm256_sqrt_pd((__m256d)x);
}
SHERD_INLINE HalfF to_float(D x) {
  return (HalfF)_mm256_cvtpd_ps((__m256d)x);
}
#else
SHERD_INLINE D sqrt(D x) {
  return (D)_mm_sqrt_pd((__m128d)x);
}
SHERD_INLINE HalfF to_float(D x) {
  return HalfF{static_cast<float>(x[0]), static_cast<float>(x[1])};
}
#endif

/// ln x of normal positive numbers: x = m·2^e with m around 1, and ln m = 2·artanh((m - 1)/(m + 1)).
SHERD_INLINE D log(D x) {
  constexpr std::int64_t root_of_half = 0x3fe6a09e667f3bcd;
  const L e = ((L)x - root_of_half) >> 52;
  const D m = (D)((L)x - (e << 52));
  const D s = (m - 1.0) / (m + 1.0), z = s * s;
  D p = all64(1.0 / 19);
#pragma GCC unroll 8
  for (int n = 17; n >= 3; n -= 2) p = p * z + 1.0 / n;
  return to_double(e) * 0x1.62e42fefa39efp-1 + 2.0 * (s + s * z * p);
}

struct SineCosine {
  D sine, cosine;
};

/// Cosine and sine of 2π·word/2^32: of the rest of at most an eighth of a turn beside the nearest quarter, by
/// their power series.
SHERD_INLINE SineCosine turn(L word) {
  const L quarter = (word + (1 << 29)) >> 30;
  const D t = to_double(word - (quarter << 30)) * (0x1p-32 * 0x1.921fb54442d18p2), z = t * t;
  D s = all64(1.0 / 355687428096000), c = all64(1.0 / 20922789888000);  // 1/17! and 1/16!
  constexpr double odd[] = {-1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
                            -1.0 / 5040,          1.0 / 120,        -1.0 / 6,        1.0};
  constexpr double even[] = {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320,
                             -1.0 / 720,         1.0 / 24,        -1.0 / 2,       1.0};
#pragma GCC unroll 8
  for (int n = 0; n < 8; ++n) s = s * z + odd[n], c = c * z + even[n];
  s = s * t;
  const L swapped = (quarter & 1) != 0;
  const D sine = swapped ? c : s, cosine = swapped ? s : c;
  return {(D)((L)sine ^ ((quarter & 2) << 62)), (D)((L)cosine ^ (((quarter + 1) & 2) << 62))};
}

/// As floats; a NaN where the true value may be the other neighbour.
SHERD_INLINE HalfF rounded(D value, D margin) {
  const HalfF low = to_float(value - margin), high = to_float(value + margin);
  return low == high ? low : __builtin_nanf("") - HalfF{};
}

/// Half of the lanes' pair: `out` is the first lane's element, the next one's lies 8 further on.
SHERD_INLINE void write_pair(L first, L second, float* out) {
  const D radius = sqrt(-2.0 * log((to_double(first) + 0.5) * 0x1p-32));
  const SineCosine at = turn(second);
  const D margin = radius * 0x1p-46;  // some ten times what the two ways differ by at most
  const HalfF x = rounded(radius * at.cosine, margin), y = rounded(radius * at.sine, margin);
#pragma GCC unroll 8
  for (int lane = 0; lane < half_lanes; ++lane) out[8 * lane] = x[lane], out[8 * lane + 1] = y[lane];
}

/// The elements of `lanes` blocks from `first` on.
SHERD_INLINE void write_blocks(const RoundKeys& keys, std::uint64_t stream, std::uint64_t first, float* out) {
  U low, high, words[4];
#pragma GCC unroll 16
  for (int lane = 0; lane < lanes; ++lane) {
    const std::uint64_t block = first + static_cast<std::uint64_t>(lane);
    low[lane] = static_cast<std::uint32_t>(block), high[lane] = static_cast<std::uint32_t>(block >> 32);
  }
  philox_blocks(keys, stream, low, high, words);
#pragma GCC unroll 2
  for (int pair = 0; pair < 4; pair += 2) {
    const Q a = (Q)words[pair], b = (Q)words[pair + 1];
    write_pair((L)(a & 0xffffffffull), (L)(b & 0xffffffffull), out + pair);
    write_pair((L)(a >> 32), (L)(b >> 32), out + 4 + pair);
  }
}

}  // namespace

void normals(std::uint64_t seed, std::uint64_t stream, std::uint64_t first, Count blocks, float* out) {
  const RoundKeys keys(seed);
  for (; blocks >= lanes; blocks -= lanes, first += lanes, out += 4 * lanes)
    write_blocks(keys, stream, first, out);
  if (blocks == 0) return;
  float rest[4 * lanes];
  write_blocks(keys, stream, first, rest);
  __builtin_memcpy(out, rest, static_cast<std::size_t>(blocks) * 4 * sizeof(float));
}

}  // namespace sherd::tensor::cpu::SHERD_ISA
