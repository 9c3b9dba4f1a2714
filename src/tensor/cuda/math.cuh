#pragma once

#include "device/cuda/launch.cuh"

// Elementary functions. For results stored in fp32 they are the CPU's (tensor/cpu/isa/vec_math.h, where the
// polynomials come from), operation by operation, and so its bits; for results that round to 16 bits they use
// the processor's own approximations, whose errors that rounding hides. fp64 takes the library's functions.

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::bits_as;
using device::SHERD_CUDA::fast_exp2;
using device::SHERD_CUDA::fast_reciprocal;

/// a·b + c rounded once, on the device and on the emulator.
__device__ inline float fused(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
__device__ inline double fused(double a, double b, double c) {
  return ::fma(a, b, c);
}

/// True where T's results may be off by a few units of fp32.
template <class S>
constexpr bool rounds_to_16 = sizeof(S) == 2;

/// e^x for x <= 88, 0 below -87.34; a NaN stays one. Within 1.5 ulp.
__device__ inline float exp_of(float x) {
  x = -88.0f > x ? -88.0f : x;
  const float shifter = 0x1.8p23f + 127.0f;
  const float z = x * 0x1.715476p0f + shifter;
  const float n = z - shifter;
  float r = x - n * 0x1.62ep-1f;
  r = r - n * 0x1.0bfbe8p-15f;
  float p = 0x1.6a2404p-10f;
  p = p * r + 0x1.123a00p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  const float scale = bits_as<float>(bits_as<std::uint32_t>(z) << 23);
  return ((p * r) * r + r + 1.0f) * scale;
}

/// The exponential that suits results stored as S.
template <class S>
__device__ inline float exp_for(float x) {
  if constexpr (rounds_to_16<S>)
    return fast_exp2(x * 0x1.715476p0f);
  else
    return exp_of(x);
}
template <class S>
__device__ inline double exp_for(double x) {
  return ::exp(x);
}

__device__ inline float magnitude(float x) {
  return bits_as<float>(bits_as<std::uint32_t>(x) & 0x7fffffffu);
}

/// e^x for any x: infinity where fp32 has no number for it.
template <class S>
__device__ inline float exp_anywhere(float x) {
  const bool large = x > 88.0f;  // from where x - 1 is exact
  const float y = exp_for<S>(large ? x - 1.0f : x) * (large ? 0x1.5bf0a8p1f : 1.0f);
  return x > 89.0f ? bits_as<float>(0x7f800000u) : y;
}
template <class S>
__device__ inline double exp_anywhere(double x) {
  return ::exp(x);
}

/// log(1 + f) for f in [√½ - 1, √2 - 1].
__device__ inline float log_near_1(float f) {
  const float s = f / (2.0f + f), z = s * s;
  float p = 0x1.c71c72p-3f;
  p = p * z + 0x1.24924ap-2f;
  p = p * z + 0x1.99999ap-2f;
  p = p * z + 0x1.555556p-1f;
  return f - s * (f - p * z);
}

/// The natural logarithm. Within 2 ulp.
__device__ inline float log_of(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::int32_t exponent = static_cast<std::int32_t>(bits - 0x3f3504f3u) >> 23;
  const float mantissa = bits_as<float>(bits - (static_cast<std::uint32_t>(exponent) << 23));
  const auto n = static_cast<float>(exponent);
  float y = log_near_1(mantissa - 1.0f);
  y = n * 0x1.62e4p-1f + (n * 0x1.7f7d1cp-20f + y);
  y = x < 0x1p-126f ? bits_as<float>(0xff800000u) : y;
  y = x < -0x1p-127f ? bits_as<float>(0x7fc00000u) : y;
  return x > 0x1.fffffep127f || x != x ? x : y;
}
__device__ inline double log_of(double x) {
  return ::log(x);
}

/// log(1 + x) for x in [0, 1]. Within 2 ulp.
__device__ inline float log_of_1_plus(float x) {
  const bool far = x > 0.41421354f;
  const float y = log_near_1(far ? (x - 1.0f) * 0.5f : x);
  return far ? y + 0x1.62e43p-1f : y;
}
__device__ inline double log_of_1_plus(double x) {
  return ::log1p(x);
}

/// tanh x. Within 2 ulp.
__device__ inline float tanh_of(float x) {
  const float a = magnitude(x);
  const float e = exp_of(-2.0f * a);
  const float large = (1.0f - e) / (1.0f + e);
  const float z = x * x;
  float p = -0x1.76adcep-8f;
  p = p * z + 0x1.525790p-6f;
  p = p * z + -0x1.b84478p-5f;
  p = p * z + 0x1.11076ap-3f;
  p = p * z + -0x1.555534p-2f;
  const float small = p * z * x + x;
  const float signed_large =
      bits_as<float>(bits_as<std::uint32_t>(large) | (bits_as<std::uint32_t>(x) & 0x80000000u));
  return a < 0.625f ? small : signed_large;
}
__device__ inline double tanh_of(double x) {
  return ::tanh(x);
}

/// The logistic function and its derivative, both accurate in either tail, for results stored as S.
template <class C>
struct SigmoidValue {
  C value, slope;
};
template <class S>
__device__ inline SigmoidValue<float> sigmoid(float x) {
  const float e = exp_for<S>(-magnitude(x));
  float inverse;
  if constexpr (rounds_to_16<S>)
    inverse = fast_reciprocal(1.0f + e);
  else
    inverse = 1.0f / (1.0f + e);
  const float small = e * inverse;
  return {x < 0.0f ? small : inverse, small * inverse};
}
template <class S>
__device__ inline SigmoidValue<double> sigmoid(double x) {
  const double e = ::exp(x < 0 ? x : -x), inverse = 1 / (1 + e), small = e * inverse;
  return {x < 0 ? small : inverse, small * inverse};
}

/// The normal distribution: Φ(x), with relative accuracy in the lower tail too, and its density φ(x).
template <class C>
struct NormalValue {
  C cdf, density;
};
template <class S>
__device__ inline NormalValue<float> normal(float x) {
  x = x > 14.0f ? 14.0f : x;  // Φ is 1 or 0 there, and infinities would meet in the differences below
  x = x < -14.0f ? -14.0f : x;
  const float t = magnitude(x);
  const float square = x * x;
  float e;
  if constexpr (rounds_to_16<S>) {
    e = fast_exp2(square * -0x1.715476p-1f);
  } else {
    // Rounding x² would become a relative error of x²/2 units in the exponential; it is found and put back.
    const float high = bits_as<float>(bits_as<std::uint32_t>(x) & 0xfffff000u), low = x - high;
    const float error = ((high * high - square) + 2.0f * (high * low)) + low * low;
    e = exp_of(-0.5f * square) * (1.0f - 0.5f * error);
  }
  const float v = (t - 3.0f) / (t + 3.0f);
  float p = 5.367187e-05f;  // e^(t²/2)·Φ(-t) for t in [0, 14]
  p = p * v + 0.00011554383f;
  p = p * v + -0.0003394849f;
  p = p * v + -0.0009837586f;
  p = p * v + 0.0029045562f;
  p = p * v + 0.006132071f;
  p = p * v + -0.04621329f;
  p = p * v + 0.12322503f;
  p = p * v + -0.20640261f;
  p = p * v + 0.12151395f;
  const float tail = e * p;
  return {x < 0.0f ? tail : 1.0f - tail, e * 0x1.988454p-2f};
}
template <class S>
__device__ inline NormalValue<double> normal(double x) {
  return {0.5 * ::erfc(-x / 1.41421356237309504880), ::exp(-0.5 * x * x) * 0.39894228040143267794};
}

}  // namespace sherd::tensor::SHERD_CUDA
