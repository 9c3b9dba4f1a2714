#pragma once

#include "tensor/cpu/isa/vec.h"

// Polynomials are minimax fits (Remez) of the functions named beside them, in fp32 without fma, so that every
// instruction set gives the same bits. Errors given are measured over the range by
// tests/tensor/elementwise_test.cpp.

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

/// e^x for x <= 88, 0 below -87.34 (where fp32 has no normal numbers); a NaN stays one. Within 1.5 ulp.
SHERD_INLINE F exp(F x) {
  x = max(all(-88.0f), x);
  // Adding 1.5·2^23 rounds x/ln2 to an integer in the low bits; the further 127 makes them a float's
  // exponent.
  const F shifter = all(0x1.8p23f + 127.0f);
  const F z = x * 0x1.715476p0f + shifter;
  const F n = z - shifter;
  F r = x - n * 0x1.62ep-1f;
  r = r - n * 0x1.0bfbe8p-15f;
  F p = all(0x1.6a2404p-10f);  // (e^r - 1 - r)/r²
  p = p * r + 0x1.123a00p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  const F scale = (F)((U)z << 23);
  return ((p * r) * r + r + 1.0f) * scale;
}

/// As above within 3e-6 of the value for x > -20, which is plenty for what 16 bits will hold.
SHERD_INLINE F short_exp(F x) {
  const F shifter = all(0x1.8p23f + 127.0f);
  const F y = max(all(-88.0f), x) * 0x1.715476p0f;
  const F z = y + shifter;
  const F f = y - (z - shifter);
  F p = all(0x1.39970cp-7f);  // 2^f for |f| <= 1/2
  p = p * f + 0x1.ca15fap-5f;
  p = p * f + 0x1.ec06e6p-3f;
  p = p * f + 0x1.62e0dap-1f;
  p = p * f + 0x1.ffffe8p-1f;
  return p * (F)((U)z << 23);
}

/// The exponential that suits results stored as S.
template <class S>
SHERD_INLINE F exp_for(F x) {
  if constexpr (sizeof(S) == 4)
    return exp(x);
  else
    return short_exp(x);
}

/// e^x for any x: infinity where fp32 has no number for it. Within 3 ulp for results stored as fp32.
template <class S>
SHERD_INLINE F exp_anywhere(F x) {
  const I large = x > 88.0f;  // from where x - 1 is exact
  const F y = exp_for<S>(large ? x - 1.0f : x) * (large ? all(0x1.5bf0a8p1f) : all(1.0f));
  return x > 89.0f ? all(__builtin_inff()) : y;
}

/// log(1 + f) for f in [√½ - 1, √2 - 1]: f - s·(f - R) with s = f/(2 + f) and R the rest of the series
/// 2·artanh(s) = 2s + s·R, whose first term left out is below 2^-28 of the value.
SHERD_INLINE F log_near_1(F f) {
  const F s = f / (2.0f + f), z = s * s;
  F p = all(0x1.c71c72p-3f);   // 2/9
  p = p * z + 0x1.24924ap-2f;  // 2/7
  p = p * z + 0x1.99999ap-2f;  // 2/5
  p = p * z + 0x1.555556p-1f;  // 2/3
  return f - s * (f - p * z);
}

/// The natural logarithm: -infinity of 0 and of subnormal numbers, NaN below. Within 2 ulp.
SHERD_INLINE F log(F x) {
  const U bits = (U)x;
  const I exponent = (I)(bits - 0x3f3504f3u) >> 23;  // of x in units of √½
  const F mantissa = (F)(bits - ((U)exponent << 23));
  const F n = __builtin_convertvector(exponent, F);
  F y = log_near_1(mantissa - 1.0f);
  y = n * 0x1.62e4p-1f + (n * 0x1.7f7d1cp-20f + y);  // ln 2 in two parts, the first one's products exact
  y = x < 0x1p-126f ? all(-__builtin_inff()) : y;
  y = x < -0x1p-127f ? all(__builtin_nanf("")) : y;
  return x > 0x1.fffffep127f || x != x ? x : y;
}

/// log(1 + x) for x in [0, 1]. Within 2 ulp.
SHERD_INLINE F log_of_1_plus(F x) {
  const I far = x > 0.41421354f;
  const F y = log_near_1(far ? (x - 1.0f) * 0.5f : x);
  return far ? y + 0x1.62e43p-1f : y;
}

/// tanh x. Within 2 ulp.
SHERD_INLINE F tanh(F x) {
  const F a = abs(x);
  const F e = exp(-2.0f * a);
  const F large = (1.0f - e) / (1.0f + e);
  const F z = x * x;
  F p = all(-0x1.76adcep-8f);  // (tanh(√z)/√z - 1)/z for √z < 0.625
  p = p * z + 0x1.525790p-6f;
  p = p * z + -0x1.b84478p-5f;
  p = p * z + 0x1.11076ap-3f;
  p = p * z + -0x1.555534p-2f;
  const F small = p * z * x + x;
  const F signed_large = (F)((U)large | ((U)x & 0x80000000u));
  return a < 0.625f ? small : signed_large;
}

/// The logistic function and its derivative, both accurate in either tail, for results stored as S.
struct Sigmoid {
  F value, slope;
};
template <class S>
SHERD_INLINE Sigmoid sigmoid(F x) {
  const F e = exp_for<S>(-abs(x));
  const F inverse = 1.0f / (1.0f + e);
  const F small = e * inverse;
  return {x < 0.0f ? small : inverse, small * inverse};
}

/// The normal distribution: Φ(x), with relative accuracy in the lower tail too (5 ulp to -5, 8 to -12), and
/// its density φ(x).
struct Normal {
  F cdf, density;
};
SHERD_INLINE Normal normal(F x) {
  x = x > 14.0f ? all(14.0f) : x;  // Φ is 1 or 0 there, and infinities would meet in the differences below
  x = x < -14.0f ? all(-14.0f) : x;
  const F t = abs(x);
  // The exponential would turn the rounding error of x² into a relative error of x²/2 units; it is found
  // exactly by splitting x in halves (Dekker's product) and put back afterwards.
  const F square = x * x;
  const F high = (F)((U)x & 0xfffff000u), low = x - high;
  const F error = ((high * high - square) + 2.0f * (high * low)) + low * low;
  const F e = exp(-0.5f * square) * (1.0f - 0.5f * error);
  const F v = (t - 3.0f) / (t + 3.0f);
  F p = all(5.367187e-05f);  // e^(t²/2)·Φ(-t) for t in [0, 14]
  p = p * v + 0.00011554383f;
  p = p * v + -0.0003394849f;
  p = p * v + -0.0009837586f;
  p = p * v + 0.0029045562f;
  p = p * v + 0.006132071f;
  p = p * v + -0.04621329f;
  p = p * v + 0.12322503f;
  p = p * v + -0.20640261f;
  p = p * v + 0.12151395f;
  const F tail = e * p;
  return {x < 0.0f ? tail : 1.0f - tail, e * 0x1.988454p-2f};
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
