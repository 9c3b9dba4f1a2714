#pragma once

#include "tensor/cuda/families.cuh"

// Conversions between dtypes, for copies of whole tensors and of rows: the CPU's, to the bit
// (tensor/cpu/conversions.h).

namespace sherd::tensor::SHERD_CUDA {

template <class T>
constexpr bool is_small_float = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

/// Rounds to an odd last bit whatever fp32 cannot hold, so that a second rounding to fewer bits is the only
/// one that shows.
__device__ inline float round_to_odd(double value) {
  const auto near = static_cast<float>(value);
  if (static_cast<double>(near) == value || value != value) return near;
  auto bits = bits_as<std::uint32_t>(near);
  if (::fabs(static_cast<double>(near)) > ::fabs(value)) --bits;
  return bits_as<float>(bits | 1u);
}

template <class To, class From>
__device__ inline To convert_one(From value) {
  if constexpr (is_small_float<From>)
    return convert_one<To>(widen(value));
  else if constexpr (is_small_float<To> && std::is_same_v<From, float>)
    return narrow<To>(value);
  else if constexpr (is_small_float<To>)
    return narrow<To>(round_to_odd(static_cast<double>(value)));
  else
    return static_cast<To>(value);
}

}  // namespace sherd::tensor::SHERD_CUDA
