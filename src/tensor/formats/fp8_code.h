#pragma once

#include <cstdint>

// FP8 numbers (Micikevicius et al. 2022, "FP8 formats for deep learning"), and the scales by which they stand
// for others. One formula serves all: loops of each instruction set take it with F, U and I as registers,
// kernels of GPUs as numbers. It is included where only plain declarations are allowed
// (tensor/cpu/isa/tables.h).
//
//           sign.exponent.mantissa  bias  least subnormal  least normal  largest        infinity  NaN
//   E4M3    1.4.3                   7     2⁻⁹              2⁻⁶           448            none      0x7f
//   E5M2    1.5.2                   15    2⁻¹⁶             2⁻¹⁴          57,344         0x7c      0x7d…0x7f
//
// A number x becomes the code of x/scale, rounded to nearest, ties to even; what is finite and rounds beyond
// the largest becomes the largest. Infinity becomes E4M3's NaN or E5M2's infinity, so that a step that went
// wrong is seen to have gone wrong. (PyTorch's casts to E4M3 on processors saturate infinity too; those to
// E5M2 make infinity of what rounds beyond the largest.)
//
// Scales are powers of two: the least with which no finite number of a block is beyond the largest. A number
// code·scale then has at most four significant bits, bf16 holds it, and scaling rounds nothing. So a
// processor's products of bf16 give what those of FP8 would, and codes with the scale of a larger block can
// be made again from what codes with this one stand for.

#if defined(__CUDACC__)
#define SHERD_FP8 __host__ __device__ __forceinline__
#else
#define SHERD_FP8 [[gnu::always_inline]] inline
#endif

namespace sherd::tensor {

enum class Fp8Format : std::uint8_t { e4m3, e5m2 };

/// The bits of a format.
struct Fp8Bits {
  int mantissa, bias;
  std::uint32_t largest, infinity;  ///< codes; infinity's is a NaN where there is none
  /// The exponent of two of the largest number, which is 1.75 times that power.
  int top;
};
constexpr Fp8Bits fp8_bits(Fp8Format format) {
  return format == Fp8Format::e4m3 ? Fp8Bits{3, 7, 0x7e, 0x7f, 8} : Fp8Bits{2, 15, 0x7b, 0x7c, 15};
}
inline constexpr std::uint32_t fp8_nan = 0x7f;

/// The least exponent of a scale: the product of two scales is a normal fp32 number.
inline constexpr int least_fp8_exponent = -60;

/// The scale of a block whose largest finite magnitude has these bits, as fp32's bits.
SHERD_FP8 constexpr std::uint32_t fp8_scale_bits(Fp8Format format, std::uint32_t largest) {
  const bool above = (largest & 0x7fffffu) > 0x600000u;  // above 1.75 times its power of two
  const int exponent = static_cast<int>(largest >> 23) - 127 - fp8_bits(format).top + (above ? 1 : 0);
  return static_cast<std::uint32_t>((exponent < least_fp8_exponent ? least_fp8_exponent : exponent) + 127)
         << 23;
}
/// The bits of 1/scale.
SHERD_FP8 constexpr std::uint32_t fp8_inverse_bits(std::uint32_t scale) {
  return (254u << 23) - scale;
}

/// The bits of x's magnitude, 0 where it is not finite: in the order of magnitudes.
template <class Math>
SHERD_FP8 typename Math::U fp8_finite_magnitude(typename Math::F x) {
  const typename Math::U magnitude = Math::bits(x) & 0x7fffffffu;
  return (typename Math::I)magnitude >= 0x7f800000 ? magnitude - magnitude : magnitude;
}

/// The code of x·inverse, where `inverse` is 1/scale.
template <Fp8Format format, class Math>
SHERD_FP8 typename Math::U fp8_encode(typename Math::F x, typename Math::F inverse) {
  using U = typename Math::U;
  using I = typename Math::I;
  constexpr Fp8Bits f = fp8_bits(format);
  constexpr int shift = 23 - f.mantissa;
  constexpr std::int32_t least_normal = (128 - f.bias) << 23;
  // Added to a number below the least normal one, this rounds to multiples of the least subnormal one.
  constexpr std::uint32_t magic = static_cast<std::uint32_t>(151 - f.bias - f.mantissa) << 23;
  const U magnitude = Math::bits(x) & 0x7fffffffu;
  const U y = Math::bits(Math::value(magnitude) * inverse);
  const U normal = ((y + ((1u << (shift - 1)) - 1u) + ((y >> shift) & 1u)) >> shift) -
                   (static_cast<std::uint32_t>(127 - f.bias) << f.mantissa);
  const U subnormal = Math::bits(Math::value(y) + Math::value(magic + (y - y))) - magic;
  U code = (I)y < least_normal ? subnormal : normal;
  code = (I)code > static_cast<std::int32_t>(f.largest) ? f.largest + (y - y) : code;
  code = (I)magnitude >= 0x7f800000 ? f.infinity + (y - y) : code;
  code = (I)magnitude > 0x7f800000 ? fp8_nan + (y - y) : code;
  return code | ((Math::bits(x) >> 24) & 0x80u);
}

/// The number that a code stands for, over its scale.
template <Fp8Format format, class Math>
SHERD_FP8 typename Math::F fp8_decode(typename Math::U code) {
  using U = typename Math::U;
  using I = typename Math::I;
  constexpr Fp8Bits f = fp8_bits(format);
  constexpr int shift = 23 - f.mantissa;
  const U shifted = (code & 0x7fu) << shift;
  const U normal = shifted + (static_cast<std::uint32_t>(127 - f.bias) << 23);
  // A subnormal number is read with the exponent of the least normal one, and that taken away: no subnormal
  // fp32 is formed, which processors flush.
  constexpr std::uint32_t least_normal = static_cast<std::uint32_t>(128 - f.bias) << 23;
  const U subnormal =
      Math::bits(Math::value(shifted + least_normal) - Math::value(least_normal + (code - code)));
  U magnitude = (I)shifted < (1 << 23) ? subnormal : normal;
  if constexpr (format == Fp8Format::e4m3)
    magnitude =
        (I)(code & 0x7fu) == static_cast<std::int32_t>(fp8_nan) ? 0x7fc00000u + (code - code) : magnitude;
  else
    magnitude = (I)shifted >= (31 << 23) ? shifted + (224u << 23) : magnitude;
  return Math::value(magnitude | ((code & 0x80u) << 24));
}

}  // namespace sherd::tensor
