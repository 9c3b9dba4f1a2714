#pragma once

#include "device/cuda/launch.cuh"
#include "tensor/argument_checks.h"
#include "tensor/cuda/cuda_kernels.h"

// Shared by the kernel families: a dtype's type, element-wise loops, word of wrong data.

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::aligned_for_packs;
using device::SHERD_CUDA::bits_as;
using device::SHERD_CUDA::block_reduce;
using device::SHERD_CUDA::block_sum;
using device::SHERD_CUDA::blocks_for;
using device::SHERD_CUDA::Compute;
using device::SHERD_CUDA::fast_exp2;
using device::SHERD_CUDA::fast_reciprocal;
using device::SHERD_CUDA::grid_thread;
using device::SHERD_CUDA::grid_threads;
using device::SHERD_CUDA::launch;
using device::SHERD_CUDA::load_pack;
using device::SHERD_CUDA::narrow;
using device::SHERD_CUDA::Pack;
using device::SHERD_CUDA::pack_width;
using device::SHERD_CUDA::store_pack;
using device::SHERD_CUDA::warp_sum;
using device::SHERD_CUDA::widen;

using Count = std::int64_t;

/// Threads of a block in element-wise loops.
inline constexpr unsigned element_threads = 256;

/// Threads of the one block that adds up what the others left.
inline constexpr unsigned sum_threads = 1024;

/// Threads of a block that adds up columns: across, and along them.
inline constexpr unsigned column_lanes = 32, row_lanes = 8;

/// The least finite value, from where maxima begin: differences with it are -infinity, never NaN.
template <class C>
inline constexpr C lowest = std::is_same_v<C, double> ? static_cast<C>(-0x1.fffffffffffffp1023)
                                                      : static_cast<C>(-0x1.fffffep127);

/// f(a, b) where both types have one compute type. (A function, as GCC 12 takes the wrong branch where a
/// generic lambda within another asks.)
template <class Fn, class A, class B>
void call_if_alike(const Fn& f, A a, B b) {
  if constexpr (std::is_same_v<Compute<A>, Compute<B>>) f(a, b);
}
/// Calls f with a value of each of two floating types that have one compute type, which was checked.
template <class Fn>
void with_floating(DType first, DType second, const Fn& f) {
  tensor::with_floating(
      first, [&](auto a) { tensor::with_floating(second, [&](auto b) { call_if_alike(f, a, b); }); });
}
using tensor::with_floating;

template <class T>
const T* in(const Tensor& t) {
  return reinterpret_cast<const T*>(t.raw());
}
template <class T>
const T* in_or_null(const Tensor& t) {
  return t ? in<T>(t) : nullptr;
}
template <class T>
T* out(const Tensor& t) {
  return reinterpret_cast<T*>(t.raw());
}

// Conversions between dtypes, for copies of whole tensors and of rows: the CPU's, to the bit
// (tensor/cpu/conversions.h).

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

/// The inputs of an element-wise loop.
template <class T, int count>
struct Sources {
  const T* at[count];
};

template <class Op, class T>
__device__ inline auto apply(const Op& op, const T (&x)[1]) {
  return op(widen(x[0]));
}
template <class Op, class T>
__device__ inline auto apply(const Op& op, const T (&x)[2]) {
  return op(widen(x[0]), widen(x[1]));
}

/// to[i] = op(widened elements i of the sources), by packs of `width` and what is left over one by one. `to`
/// may be a source.
template <int width, class Op, class Out, class In, int count>
__global__ void map_kernel(Op op, Count n, Out* to, Sources<In, count> from) {
  const Count packs = n / width;
  for (Count i = grid_thread(); i < packs; i += grid_threads()) {
    Pack<In, width> x[count];
    for (int source = 0; source < count; ++source) x[source] = load_pack<width>(from.at[source] + i * width);
    Pack<Out, width> y;
    for (int k = 0; k < width; ++k) {
      In element[count];
      for (int source = 0; source < count; ++source) element[source] = x[source].at[k];
      y.at[k] = narrow<Out>(apply(op, element));
    }
    store_pack(to + i * width, y);
  }
  const Count rest = packs * width + grid_thread();
  if (rest >= n) return;
  In element[count];
  for (int source = 0; source < count; ++source) element[source] = from.at[source][rest];
  to[rest] = narrow<Out>(apply(op, element));
}

/// Queues the loop above over n elements.
template <class Op, class Out, class In, class... More>
void map(const Target& target, const Op& op, Count n, Out* to, const In* first, const More*... more) {
  if (n == 0) return;
  constexpr int count = 1 + sizeof...(More);
  constexpr int width = pack_width<std::conditional_t<(sizeof(In) > sizeof(Out)), Out, In>>;
  const Sources<In, count> from{{first, more...}};
  const bool packs = aligned_for_packs(to, first, more...);
  const unsigned grid =
      blocks_for(n, packs ? element_threads * width : element_threads, target.processors, 32);
  launch(packs ? map_kernel<width, Op, Out, In, count> : map_kernel<1, Op, Out, In, count>, grid,
         element_threads, 0, target.stream, op, n, to, from);
}

/// Leaves word that element `position` holds `value`, which `limit` does not allow.
__device__ inline void raise(DataErrorSlot* slot, Count position, std::int32_t value, Count limit) {
  const auto word = static_cast<unsigned long long>(position) << 32 | static_cast<std::uint32_t>(value);
  atomicExch(&slot->limit, static_cast<unsigned long long>(limit));
  atomicMin(&slot->first, word);
}

}  // namespace sherd::tensor::SHERD_CUDA
