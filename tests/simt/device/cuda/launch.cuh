#pragma once

// Stands before src/device/cuda/launch.cuh on the include path of the emulated kernels (tests/simt/simt.h)
// and gives them what they use of CUDA, on the CPU.

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "device/cuda/target.h"
#include "simt/simt.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define SHERD_SHARED(T, name, n)                                    \
  static thread_local ::sherd::simt::SharedArray<T, n> name##_held; \
  T(&name)[n] = name##_held.of_this_block()
#define SHERD_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::sherd::simt::dynamic_shared())

#define SHERD_UNROLL

using dim3 = sherd::simt::Dim3;
inline constexpr int warpSize = 32;

// ---- barriers and warps ----

inline void __syncthreads() {
  sherd::simt::block_barrier();
}
inline int __syncthreads_or(int predicate) {
  return sherd::simt::block_vote(predicate != 0) > 0;
}
inline int __syncthreads_count(int predicate) {
  return sherd::simt::block_vote(predicate != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  sherd::simt::warp_barrier(mask);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int self = sherd::simt::lane_id();
  return sherd::simt::shuffle(mask, value, self / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int self = sherd::simt::lane_id(), from = self ^ lane_mask;
  return sherd::simt::shuffle(mask, value, from / width > self / width ? self : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int self = sherd::simt::lane_id(), from = self + static_cast<int>(delta);
  return sherd::simt::shuffle(mask, value, from / width == self / width ? from : self);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int self = sherd::simt::lane_id(), from = self - static_cast<int>(delta);
  return sherd::simt::shuffle(mask, value, from >= self / width * width ? from : self);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* votes = sherd::simt::warp_exchange(mask, predicate != 0);
  unsigned out = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1u && votes[lane]) out |= 1u << lane;
  return out;
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

// ---- atomics: one thread runs at a time ----

/// *at becomes next(*at); returns what it was. Its accesses are noted as one atomic one instead.
template <class T, class Next>
__attribute__((no_sanitize("thread"))) T sherd_simt_update(T* at, const Next& next) {
  sherd::simt::note_atomic(at, sizeof(T));
  const T before = *at;
  *at = next(before);
  return before;
}
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "no float atomics: their sums have no fixed order");
  return sherd_simt_update(at, [&](T x) { return static_cast<T>(x + value); });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return sherd_simt_update(at, [&](T x) { return x < value ? value : x; });
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  return sherd_simt_update(at, [&](T x) { return value < x ? value : x; });
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return sherd_simt_update(at, [&](T x) { return x | value; });
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return sherd_simt_update(at, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return sherd_simt_update(at, [&](T x) { return x == expected ? value : x; });
}
inline void __threadfence() {}

// ---- arithmetic ----

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

namespace sherd::device::SHERD_CUDA {

template <class... Params, std::size_t... i>
void call_kernel(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                 void* const* arguments, std::index_sequence<i...>) {
  ::sherd::simt::run(grid, block, shared_bytes,
                     [&] { kernel(*static_cast<std::remove_const_t<Params>*>(arguments[i])...); });
}

/// Runs kernel(args...) to its end, or queues it where there is a stream.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, StreamQueue* stream,
            Args&&... args) {
  std::tuple<std::remove_const_t<Params>...> values(std::forward<Args>(args)...);
  if (!stream) return ::sherd::simt::run(grid, block, shared_bytes, [&] { std::apply(kernel, values); });
  const auto* entry = reinterpret_cast<const void*>(kernel);
  ::sherd::simt::enroll(
      entry, {{sizeof(Params)...},
              [](const void* at, dim3 blocks, dim3 threads, std::size_t bytes, void* const* arguments) {
                call_kernel(reinterpret_cast<void (*)(Params...)>(const_cast<void*>(at)), blocks, threads,
                            bytes, arguments, std::index_sequence_for<Params...>());
              }});
  std::apply(
      [&](auto&... value) {
        void* const pointers[] = {&value..., nullptr};
        const std::size_t sizes[] = {sizeof(value)..., 0};
        stream->launch({entry,
                        {grid.x, grid.y, grid.z},
                        {block.x, block.y, block.z},
                        shared_bytes,
                        std::span(pointers, sizeof...(value)),
                        std::span(sizes, sizeof...(value))});
      },
      values);
}

inline bool reachable(const void* memory) {
  const auto ask = ::sherd::simt::memory_lookup().reachable;
  return !ask || ask(memory);
}

inline void check_alignment(const void* memory, std::size_t alignment) {
  ::sherd::simt::check_alignment(memory, alignment);
}

inline float fast_exp2(float x) {
  return std::exp2(x);
}
inline float fast_reciprocal(float x) {
  return 1.0f / x;
}

/// PTX's cvt.rn.satfinite to a number of so many mantissa bits: a NaN loses its sign, infinity becomes the
/// largest number.
inline std::uint32_t to_fp8_by_hardware(float x, int mantissa, int bias, std::uint32_t largest) {
  if (std::isnan(x)) return 0x7f;
  const std::uint32_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isinf(x)) return sign | largest;
  const double size = std::fabs(static_cast<double>(x));
  int exponent = size > 0 ? std::ilogb(size) : 1 - bias;
  if (exponent < 1 - bias) exponent = 1 - bias;
  const double units = std::nearbyint(std::ldexp(size, mantissa - exponent));  // ties to even
  const auto code =
      static_cast<std::int64_t>(units) + (static_cast<std::int64_t>(exponent + bias - 1) << mantissa);
  return sign | (code > largest ? largest : static_cast<std::uint32_t>(code));
}
inline constexpr bool converts_to_fp8 = true;
inline std::uint32_t to_e4m3_pair(float low, float high) {
  return to_fp8_by_hardware(low, 3, 7, 0x7e) | to_fp8_by_hardware(high, 3, 7, 0x7e) << 8;
}
inline std::uint32_t to_e5m2_pair(float low, float high) {
  return to_fp8_by_hardware(low, 2, 15, 0x7b) | to_fp8_by_hardware(high, 2, 15, 0x7b) << 8;
}

}  // namespace sherd::device::SHERD_CUDA

#include "device/cuda/device_code.cuh"
