#pragma once

// Shared by kernels, on the device and on the emulator. Included by launch.cuh, whichever of the two that
// is.

#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"

namespace sherd::device::SHERD_CUDA {

/// fp64 for fp64, else fp32: the type that sums and functions are formed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class To, class From>
__device__ inline To bits_as(From value) {
  return std::bit_cast<To>(value);
}

// The conversions of base/dtype.h, to the bit, NaNs included.
__device__ inline float widen(float x) {
  return x;
}
__device__ inline double widen(double x) {
  return x;
}
__device__ inline float widen(bf16 x) {
  return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
__device__ inline float widen(f16 x) {
  const std::uint32_t shifted = (x.bits & 0x7fffu) << 13, exponent = x.bits & 0x7c00u;
  const std::uint32_t normal = shifted + 0x38000000u;
  // A subnormal m is read as 2^-14·(1 + m/1024); no subnormal fp32 is formed, which would be flushed.
  const std::uint32_t subnormal = bits_as<std::uint32_t>(bits_as<float>(shifted + 0x38800000u) - 0x1p-14f);
  std::uint32_t magnitude = exponent == 0 ? subnormal : normal;
  if (exponent == 0x7c00u) magnitude = normal + 0x38000000u;
  return bits_as<float>(magnitude | (x.bits & 0x8000u) << 16);
}

/// The value of compute type rounded to T: to nearest, ties to even.
template <class T>
__device__ inline T narrow(Compute<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    const auto u = bits_as<std::uint32_t>(x);
    const std::uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u);
    T out;
    out.bits = static_cast<std::uint16_t>((x != x ? u | 0x400000u : rounded) >> 16);
    return out;
  } else if constexpr (std::is_same_v<T, f16>) {
    const auto u = bits_as<std::uint32_t>(x);
    const std::uint32_t magnitude = u & 0x7fffffffu;
    std::uint32_t half = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
    // A subnormal half: the addition rounds at the right place.
    if (magnitude < 0x38800000u)
      half = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    if (magnitude >= 0x477ff000u) half = 0x7c00u;
    if (magnitude > 0x7f800000u) half = 0x7e00u;
    T out;
    out.bits = static_cast<std::uint16_t>(half | (u >> 16 & 0x8000u));
    return out;
  } else {
    return x;
  }
}

/// n consecutive elements that move as one access where they are aligned to their size (16 bytes at most).
template <class T, int n>
struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Pack {
  T at[n];
};
/// Elements of T in 16 bytes.
template <class T>
constexpr int pack_width = 16 / static_cast<int>(sizeof(T));

template <int n, class T>
__device__ inline Pack<T, n> load_pack(const T* from) {
  check_alignment(from, alignof(Pack<T, n>));
  return *reinterpret_cast<const Pack<T, n>*>(from);
}
template <int n, class T>
__device__ inline void store_pack(T* to, const Pack<T, n>& pack) {
  check_alignment(to, alignof(Pack<T, n>));
  *reinterpret_cast<Pack<T, n>*>(to) = pack;
}
/// Whether every one of these addresses may be accessed by 16 bytes.
template <class... P>
bool aligned_for_packs(const P*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

constexpr unsigned all_lanes = 0xffffffffu;

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

/// The value folded over the warp by op (commutative), in one fixed order; every lane gets it. All lanes take
/// part.
template <class T, class Op>
__device__ inline T warp_reduce(T value, Op op) {
  for (int distance = 16; distance >= 1; distance /= 2)
    value = op(value, __shfl_xor_sync(all_lanes, value, distance));
  return value;
}
template <class T>
__device__ inline T warp_sum(T value) {
  return warp_reduce(value, Plus{});
}

/// The same over a one-dimensional block of whole warps; every thread gets the result. Ends with shared
/// memory in use that the next call waits for.
template <class T, class Op>
__device__ inline T block_reduce(T value, Op op, T neutral) {
  SHERD_SHARED(T, parts, 32);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  value = warp_reduce(value, op);
  __syncthreads();  // until everyone has read the parts of an earlier call
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  return warp_reduce(lane < blockDim.x / 32 ? parts[lane] : neutral, op);
}
template <class T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, Plus{}, T{});
}

/// The first index of a thread and the stride of a one-dimensional grid.
__device__ inline std::int64_t grid_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t grid_threads() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

/// Blocks for `items` of which each takes `per_block`: at most `full` per processor, for loops that stride
/// over the grid.
inline unsigned blocks_for(std::int64_t items, std::int64_t per_block, int processors, int full = 16) {
  const std::int64_t needed = (items + per_block - 1) / per_block;
  const std::int64_t most = static_cast<std::int64_t>(processors) * full;
  return static_cast<unsigned>(needed < 1 ? 1 : needed < most ? needed : most);
}

}  // namespace sherd::device::SHERD_CUDA
