#pragma once

#include <variant>

#include "base/random.h"
#include "device/cuda/launch.cuh"
#include "optim/cuda/kernels.h"

// How the kernels of update rules read and write their streams.

namespace sherd::optim::SHERD_CUDA {
namespace {

using namespace device::SHERD_CUDA;
using Count = std::int64_t;

/// A span among those of a kernel. Offsets are applied by those who use its memory.
struct Streams {
  float* master;
  std::uint16_t* low;
  const void* grad;
  void* moments[2];
  void* param;
  Count n;
  Count first_element;
  RandomKey noise;
  Count end_tile;  ///< tiles of the spans up to this one
  float decay;
  bool packs;  ///< everything is aligned for packs of four
};

/// The values that all spans of a kernel share.
struct Common {
  GradIndex grad_index;
  float factor;  ///< gradients are multiplied by it
  std::uint32_t largest_weight, largest_moment;
};

/// Functions that rules take from here.
struct Math {
  __device__ static float root(float x) { return ::sqrtf(x); }
};

/// Elements that a block takes at a time: a tile of the noise, 64 rows of 64.
constexpr int side = 64, tile = side * side;
constexpr unsigned threads = 256;

__device__ inline std::uint32_t magnitude(float x) {
  return bits_as<std::uint32_t>(x) & 0x7fffffffu;
}

template <int width, class T>
__device__ inline void read(const void* from, Count at, float (&to)[width]) {
  const Pack<T, width> pack = load_pack<width>(static_cast<const T*>(from) + at);
  for (int k = 0; k < width; ++k) to[k] = widen(pack.at[k]);
}
template <int width, class T>
__device__ inline void write(void* to, Count at, const float (&from)[width]) {
  Pack<T, width> pack;
  for (int k = 0; k < width; ++k) pack.at[k] = narrow<T>(from[k]);
  store_pack(static_cast<T*>(to) + at, pack);
}

template <int width>
__device__ inline void read_gradient(const Streams& x, GradIndex index, Count at, float (&to)[width]) {
  if (index == grad_f32)
    read<width, float>(x.grad, at, to);
  else if (index == grad_bf16)
    read<width, bf16>(x.grad, at, to);
  else
    read<width, f16>(x.grad, at, to);
}

template <int width, MasterIndex form>
__device__ inline void read_master(const Streams& x, Count at, float (&to)[width]) {
  if constexpr (form == master_split) {
    const auto high = load_pack<width>(static_cast<const std::uint16_t*>(x.param) + at);
    const auto low = load_pack<width>(x.low + at);
    for (int k = 0; k < width; ++k)
      to[k] = bits_as<float>((std::uint32_t{high.at[k]} << 16) +
                             static_cast<std::uint32_t>(std::int32_t{static_cast<std::int16_t>(low.at[k])}));
  } else {
    read<width, float>(x.master, at, to);
  }
}

template <int width, MasterIndex form>
__device__ inline void write_master(const Streams& x, Count at, const float (&from)[width]) {
  if constexpr (form != master_split) write<width, float>(x.master, at, from);
  if constexpr (form == master_and_f16) write<width, f16>(x.param, at, from);
  if constexpr (form == master_and_bf16 || form == master_split) {
    Pack<std::uint16_t, width> high, low;
    for (int k = 0; k < width; ++k) {
      const auto bits = bits_as<std::uint32_t>(from[k]);
      high.at[k] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
      low.at[k] = static_cast<std::uint16_t>(bits);
    }
    store_pack(static_cast<std::uint16_t*>(x.param) + at, high);
    if constexpr (form == master_split) store_pack(x.low + at, low);
  }
}

inline float decay_of(const AnyRule& any) {
  return std::visit([](const auto& rule) { return rule.decay; }, any);
}
/// `tiles`: of the spans before it.
inline Streams streams_of(const SpanPlan& plan, const SpanUpdate& span, Count tiles) {
  Streams x{span.low ? nullptr : span.master,
            span.low,
            span.grad,
            {span.moments[0], span.moments[1]},
            span.param_dtype == DType::f32 ? nullptr : span.param,
            span.n,
            plan.moment == moment_bf16 ? span.first_element : 0,
            plan.noise,
            0,
            decay_of(plan.rule),
            false};
  x.end_tile = tiles + (x.first_element + x.n - 1) / tile - x.first_element / tile + 1;
  // A tile's first element may lie anywhere in memory; all others of a tile follow at multiples of four.
  x.packs =
      x.first_element % 4 == 0 &&
      aligned_for_packs(x.master, x.low, static_cast<const std::byte*>(x.grad),
                        static_cast<const std::byte*>(x.moments[0]),
                        static_cast<const std::byte*>(x.moments[1]), static_cast<const std::byte*>(x.param));
  return x;
}

}  // namespace
}  // namespace sherd::optim::SHERD_CUDA
