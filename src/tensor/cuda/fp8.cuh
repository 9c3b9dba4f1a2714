#pragma once

#include "tensor/cuda/families.cuh"
#include "tensor/formats/fp8.h"

// Shared by the kernels that make FP8 by tensor/formats/fp8_code.h, the processors' to the bit. They take
// tiles of 128 x 128.

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::all_lanes;
using device::SHERD_CUDA::converts_to_fp8;
using device::SHERD_CUDA::Larger;
using device::SHERD_CUDA::to_e4m3_pair;
using device::SHERD_CUDA::to_e5m2_pair;

using Bits = std::uint32_t;

inline constexpr unsigned fp8_threads = 256, fp8_warps = fp8_threads / 32;
inline constexpr int fp8_side = static_cast<int>(fp8_block), fp8_warp_rows = fp8_side / int{fp8_warps};

/// Numbers for tensor/formats/fp8_code.h.
struct Fp8Numbers {
  using F = float;
  using U = Bits;
  using I = std::int32_t;
  __device__ static U bits(F f) { return bits_as<U>(f); }
  __device__ static F value(U u) { return bits_as<F>(u); }
};

/// How many elements were lost, two counts in one: those not finite, and above them those become zero.
struct Fp8Lost {
  static constexpr int shift = 16;  // a tile has 16,384 elements
  unsigned both = 0;
};

/// The codes of two numbers with one scale, `low`'s the low byte: by the card's conversion where it has one,
/// but that of what is not finite.
template <Fp8Format format>
__device__ inline Bits fp8_pair(float low, float high, float inverse, Fp8Lost& lost) {
  const Bits a = bits_as<Bits>(low) & 0x7fffffffu, b = bits_as<Bits>(high) & 0x7fffffffu;
  Bits codes;
  if (converts_to_fp8 && Larger{}(a, b) < 0x7f800000u) {
    codes = format == Fp8Format::e4m3 ? to_e4m3_pair(low * inverse, high * inverse)
                                      : to_e5m2_pair(low * inverse, high * inverse);
  } else {
    codes = fp8_encode<format, Fp8Numbers>(low, inverse) | fp8_encode<format, Fp8Numbers>(high, inverse) << 8;
    lost.both += (a >= 0x7f800000u ? 1u : 0u) + (b >= 0x7f800000u ? 1u : 0u);
  }
  constexpr unsigned zero = 1u << Fp8Lost::shift;
  lost.both += (a != 0 && (codes & 0x7fu) == 0 ? zero : 0u) + (b != 0 && (codes & 0x7f00u) == 0 ? zero : 0u);
  return codes;
}
/// The codes of all of a pack.
template <Fp8Format format, class S, int width>
__device__ inline Pack<std::uint8_t, width> fp8_codes(const Pack<S, width>& x, float inverse, Fp8Lost& lost) {
  Pack<std::uint8_t, width> out;
  SHERD_UNROLL
  for (int k = 0; k < width; k += 2) {
    const Bits pair = fp8_pair<format>(widen(x.at[k]), widen(x.at[k + 1]), inverse, lost);
    out.at[k] = static_cast<std::uint8_t>(pair), out.at[k + 1] = static_cast<std::uint8_t>(pair >> 8);
  }
  return out;
}
__device__ inline float fp8_inverse(Bits scale) {
  return bits_as<float>(fp8_inverse_bits(scale));
}

/// Up to `width` elements, zeros behind them; by one access where they are all there and `packs` says that
/// they are aligned.
template <int width, class T>
__device__ inline Pack<T, width> load_part(const T* from, Count count, bool packs) {
  if (packs && count >= width) return load_pack<width>(from);
  Pack<T, width> out{};
  SHERD_UNROLL
  for (int k = 0; k < width; ++k)
    if (k < count) out.at[k] = from[k];
  return out;
}
template <int width, class T>
__device__ inline void store_part(T* to, const Pack<T, width>& part, Count count, bool packs) {
  if (packs && count >= width) return store_pack(to, part);
  SHERD_UNROLL
  for (int k = 0; k < width; ++k)
    if (k < count) to[k] = part.at[k];
}
template <class S, int width>
__device__ inline Bits largest_of(const Pack<S, width>& part) {
  Bits most = 0;
  SHERD_UNROLL
  for (int k = 0; k < width; ++k) most = Larger{}(most, fp8_finite_magnitude<Fp8Numbers>(widen(part.at[k])));
  return most;
}

/// f(S{}) for the types that become FP8.
template <class Fn>
void with_fp8_source(DType dtype, const Fn& f) {
  with_floating(dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), double>) f(type);
  });
}
/// f(constant) of the format.
template <class Fn>
void with_fp8_format(Fp8Format format, const Fn& f) {
  if (format == Fp8Format::e4m3)
    f(std::integral_constant<Fp8Format, Fp8Format::e4m3>{});
  else
    f(std::integral_constant<Fp8Format, Fp8Format::e5m2>{});
}

/// scale = the larger of what it is and the largest finite magnitude of x.
void raise_to_largest(const Target& target, const Tensor& x, const Tensor& scale);

}  // namespace sherd::tensor::SHERD_CUDA
