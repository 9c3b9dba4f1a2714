#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "tensor/cpu/loops.h"

// Conversions between dtypes, for copies of whole tensors and of rows.

namespace sherd::tensor::cpu {

/// Rounds to an odd last bit whatever fp32 cannot hold, so that a second rounding to fewer bits is the only
/// one that shows.
inline float round_to_odd(double value) {
  const float near = static_cast<float>(value);
  if (static_cast<double>(near) == value || std::isnan(value)) return near;
  auto bits = std::bit_cast<std::uint32_t>(near);
  if (std::fabs(static_cast<double>(near)) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

template <class T>
constexpr bool is_small_float = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

/// One element of a floating or integer type as `To`; integers are range-checked by the caller.
template <class To, class From>
To convert_one(From value) {
  if constexpr (is_small_float<From>)
    return convert_one<To>(static_cast<float>(value));
  else if constexpr (is_small_float<To> && std::is_same_v<From, float>)
    return To(value);
  else if constexpr (is_small_float<To>)
    return To(round_to_odd(static_cast<double>(value)));
  else
    return static_cast<To>(value);
}

/// to[to_first, to_first + n) (+)= from[from_first, …), neither of them fp64 or an integer.
inline void convert_floats(const IsaTable& isa, const Tensor& from, Count from_first, const Tensor& to,
                           Count to_first, Count n, bool accumulate = false) {
  const ConvertOps& source = isa.convert[storage_index(from)];
  if (to.dtype() == DType::f32)
    return (accumulate ? source.add_to : source.load)(at(from, from_first), to.data<float>() + to_first, n);
  if (from.dtype() == DType::f32)
    return write_sums(isa, from.data<float>() + from_first, to, to_first, n, accumulate);
  float block[stack_block];
  for (Count i = 0; i < n; i += stack_block) {
    const Count count = std::min(stack_block, n - i);
    source.load(at(from, from_first + i), block, count);
    write_sums(isa, block, to, to_first + i, count, accumulate);
  }
}

}  // namespace sherd::tensor::cpu
