#pragma once

// The one door from kernels to CUDA. Sources with kernels (*.cu) include this header and the repository's
// own, nothing else of CUDA; tests/simt has a header of the same name that runs them on the CPU. So what is
// used of CUDA, here and in kernels, must be there too. tensor_cores.cuh is the part of it that some need.
//
// Flags of these sources: -fmad=false -ftz=true -prec-div=true -prec-sqrt=true, so that fp32 arithmetic gives
// the CPU's bits; --expt-relaxed-constexpr, so that constexpr functions of base run on the device.

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "device/cuda/driver.h"
#include "device/cuda/target.h"

/// A block's array `name` of n elements of T, a type without constructor; uninitialised.
#define SHERD_SHARED(T, name, n) __shared__ T name[n]
/// The block's memory that launch() was asked for, as T* `name`, aligned to 16 bytes; uninitialised.
#define SHERD_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char sherd_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(sherd_dynamic_shared)

/// Before a loop whose body indexes arrays that must stay in registers.
#define SHERD_UNROLL _Pragma("unroll")

namespace sherd::device::SHERD_CUDA {

/// Queues kernel(args...) on `stream` with `shared_bytes` of dynamic shared memory.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, StreamQueue* stream,
            Args&&... args) {
  const auto* entry = reinterpret_cast<const void*>(kernel);
  std::tuple<std::remove_const_t<Params>...> values(std::forward<Args>(args)...);
  std::apply(
      [&](auto&... value) {
        void* const pointers[] = {&value..., nullptr};
        constexpr std::size_t sizes[] = {sizeof(value)..., 0};
        constexpr std::size_t count = sizeof...(value);
        stream->launch({entry,
                        {grid.x, grid.y, grid.z},
                        {block.x, block.y, block.z},
                        shared_bytes,
                        std::span(pointers, count),
                        std::span(sizes, count)});
      },
      values);
}

/// True for memory that kernels can work on by this address: the device's, and the host's where it is
/// page-locked (but for registered memory of systems on which that has another address on the device).
inline bool reachable(const void* memory) {
  cudaPointerAttributes attributes{};
  check_call(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeHost) return attributes.devicePointer == memory;
  return attributes.type != cudaMemoryTypeUnregistered;
}

/// The emulator looks; a device faults by itself.
__device__ inline void check_alignment(const void*, std::size_t) {}

/// 2^x and 1/x within 2 units in the last place, one instruction each; subnormal numbers count as zero.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Whether the functions below are there: from compute capability 8.9 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool converts_to_fp8 = true;
#else
inline constexpr bool converts_to_fp8 = false;
#endif
/// Two finite numbers rounded to E4M3, or E5M2, what is too large to the largest; `low` becomes the low byte.
__device__ inline std::uint32_t to_e4m3_pair(float low, float high) {
  std::uint16_t codes = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
  return codes;
}
__device__ inline std::uint32_t to_e5m2_pair(float low, float high) {
  std::uint16_t codes = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
  return codes;
}

}  // namespace sherd::device::SHERD_CUDA

#include "device/cuda/device_code.cuh"
