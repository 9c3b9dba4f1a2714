#include "comm/cuda/reduce.h"

#include "base/error.h"
#include "device/cuda/launch.cuh"

namespace sherd::comm::SHERD_CUDA {
namespace {

using namespace device::SHERD_CUDA;
using Count = std::int64_t;

constexpr int most_ranks = 64;
constexpr unsigned threads = 256;

/// Addresses of one range at every rank, and of what its sum begins with (or null).
struct ReducedMemory {
  const std::byte* sources[most_ranks];
  std::byte* outs[most_ranks];
  const std::byte* onto;
  int source_count, out_count;
};

template <class T>
__device__ inline const T* source(const ReducedMemory& places, int rank) {
  return reinterpret_cast<const T*>(places.sources[rank]);
}
template <class T>
__device__ inline T* out(const ReducedMemory& places, int k) {
  return reinterpret_cast<T*>(places.outs[k]);
}

__device__ inline float round_single(DType rounding, float value) {
  if (rounding == DType::bf16) return widen(narrow<bf16>(value));
  if (rounding == DType::f16) return widen(narrow<f16>(value));
  return value;
}

/// The start of the sum from element `at` on, in fp32 or in the type of the outputs.
template <int width, class Out>
__device__ inline void load_onto(const ReducedMemory& places, DType type, Count at, float (&sum)[width]) {
  if (type == DType::f32) {
    const Pack<float, width> onto = load_pack<width>(reinterpret_cast<const float*>(places.onto) + at);
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) sum[k] = onto.at[k];
  } else {
    const Pack<Out, width> onto = load_pack<width>(reinterpret_cast<const Out*>(places.onto) + at);
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) sum[k] = widen(onto.at[k]);
  }
}

/// Sums of fp32, bf16 and fp16 into any of them: each element is read once per rank and written once per
/// output.
template <int width, class In, class Out>
__global__ void sum_kernel(ReducedMemory places, float factor, DType rounding, DType onto, Count n) {
  for (Count at = grid_thread() * width; at < n; at += grid_threads() * width) {
    float sum[width];
    const Pack<In, width> first = load_pack<width>(source<In>(places, 0) + at);
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) sum[k] = round_single(rounding, widen(first.at[k]));
    if (places.onto) {
      float begun[width];
      load_onto<width, Out>(places, onto, at, begun);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) sum[k] = begun[k] + sum[k];
    }
    for (int rank = 1; rank < places.source_count; ++rank) {
      const Pack<In, width> next = load_pack<width>(source<In>(places, rank) + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) sum[k] = sum[k] + round_single(rounding, widen(next.at[k]));
    }
    Pack<Out, width> result;
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) result.at[k] = narrow<Out>(sum[k] * factor);
    for (int copy = 0; copy < places.out_count; ++copy) store_pack(out<Out>(places, copy) + at, result);
  }
}

/// A NaN wins, and of equals the first, so that the result is one of the inputs and the same on all ranks.
template <class T>
__device__ inline T better(ReduceOp op, T held, T next) {
  const bool take = op == ReduceOp::max ? next > held : next < held;
  return (take || next != next) ? next : held;
}

__device__ inline double read_double(DType dtype, const std::byte* from, Count i) {
  switch (dtype) {
    case DType::f64:
      return reinterpret_cast<const double*>(from)[i];
    case DType::f32:
      return reinterpret_cast<const float*>(from)[i];
    case DType::bf16:
      return widen(reinterpret_cast<const bf16*>(from)[i]);
    default:
      return widen(reinterpret_cast<const f16*>(from)[i]);
  }
}
__device__ inline void write_double(DType dtype, std::byte* to, Count i, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::f64:
      reinterpret_cast<double*>(to)[i] = value;
      return;
    case DType::f32:
      reinterpret_cast<float*>(to)[i] = single;
      return;
    case DType::bf16:
      reinterpret_cast<bf16*>(to)[i] = narrow<bf16>(single);
      return;
    default:
      reinterpret_cast<f16*>(to)[i] = narrow<f16>(single);
      return;
  }
}

__device__ inline double read_rounded(const ReduceSpec& how, const std::byte* from, Count i) {
  const double value = read_double(how.in, from, i);
  return how.rounding == DType::f64 ? value : round_single(how.rounding, static_cast<float>(value));
}

__device__ inline double add(bool wide, double sum, double next) {
  return wide ? sum + next : static_cast<float>(sum) + static_cast<float>(next);
}

/// Where fp64 takes part, and extremes of floats. Sums run in fp64 only when the sources are fp64.
__global__ void floats_kernel(ReducedMemory places, ReduceSpec how, Count n) {
  const bool wide = how.in == DType::f64;
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    double value = read_rounded(how, places.sources[0], i);
    if (places.onto) value = add(wide, read_double(how.onto_type, places.onto, i), value);
    for (int rank = 1; rank < places.source_count; ++rank) {
      const double next = read_rounded(how, places.sources[rank], i);
      value = how.op == ReduceOp::sum ? add(wide, value, next) : better(how.op, value, next);
    }
    value = wide ? value * how.factor : static_cast<float>(value) * static_cast<float>(how.factor);
    for (int copy = 0; copy < places.out_count; ++copy) write_double(how.out, places.outs[copy], i, value);
  }
}

template <class T, class Unsigned>
__device__ inline T wrapping_sum(T sum, T next) {
  return static_cast<T>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(next));
}

/// Integers wrap around; a factor is applied in fp64 and rounded to the nearest.
template <class T, class Unsigned>
__global__ void integers_kernel(ReducedMemory places, ReduceSpec how, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    T value = source<T>(places, 0)[i];
    if (places.onto) value = wrapping_sum<T, Unsigned>(reinterpret_cast<const T*>(places.onto)[i], value);
    for (int rank = 1; rank < places.source_count; ++rank) {
      const T next = source<T>(places, rank)[i];
      value = how.op == ReduceOp::sum ? wrapping_sum<T, Unsigned>(value, next) : better(how.op, value, next);
    }
    if (how.factor != 1) value = static_cast<T>(llrint(static_cast<double>(value) * how.factor));
    for (int copy = 0; copy < places.out_count; ++copy) out<T>(places, copy)[i] = value;
  }
}

// ---- on the host ----

bool aligned(const ReducedMemory& places) {
  bool all = places.onto == nullptr || aligned_for_packs(places.onto);
  for (int r = 0; r < places.source_count; ++r) all = all && aligned_for_packs(places.sources[r]);
  for (int k = 0; k < places.out_count; ++k) all = all && aligned_for_packs(places.outs[k]);
  return all;
}

template <int width, class In, class Out>
void sum_part(const Target& target, ReducedMemory places, const ReduceSpec& how, Count begin, Count end) {
  if (begin == end) return;
  for (int r = 0; r < places.source_count; ++r) places.sources[r] += begin * static_cast<Count>(sizeof(In));
  for (int k = 0; k < places.out_count; ++k) places.outs[k] += begin * static_cast<Count>(sizeof(Out));
  if (places.onto) places.onto += begin * static_cast<Count>(size_of(how.onto_type));
  const DType rounding = how.rounding == how.in ? DType::f32 : how.rounding;  // rounding changes nothing
  launch(sum_kernel<width, In, Out>, blocks_for(end - begin, Count{threads} * width, target.processors, 32),
         threads, 0, target.stream, places, static_cast<float>(how.factor), rounding, how.onto_type,
         end - begin);
}

template <class In, class Out>
void sum(const Target& target, const ReducedMemory& places, const ReduceSpec& how, Count n) {
  constexpr int width = 16 / static_cast<int>(sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
  const Count packed = aligned(places) ? n / width * width : 0;
  sum_part<width, In, Out>(target, places, how, 0, packed);
  sum_part<1, In, Out>(target, places, how, packed, n);
}

template <class In>
void sum_into(const Target& target, const ReducedMemory& places, const ReduceSpec& how, Count n) {
  if (how.out == DType::f32) return sum<In, float>(target, places, how, n);
  if (how.out == DType::bf16) return sum<In, bf16>(target, places, how, n);
  sum<In, f16>(target, places, how, n);
}

template <class Kernel>
void elementwise(const Target& target, Kernel kernel, const ReducedMemory& places, const ReduceSpec& how,
                 Count n) {
  launch(kernel, blocks_for(n, threads, target.processors, 32), threads, 0, target.stream, places, how, n);
}

bool narrow_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

}  // namespace

void reduce(const Target& target, const ReduceSpec& how, std::span<const std::byte* const> sources,
            std::span<std::byte* const> outs, Count n) {
  require(sources.size() <= most_ranks && outs.size() <= most_ranks, "at most ", most_ranks,
          " ranks can share one GPU, not ", sources.size());
  if (n == 0) return;
  ReducedMemory places{};
  for (const std::byte* from : sources) places.sources[places.source_count++] = from;
  for (std::byte* to : outs) places.outs[places.out_count++] = to;
  places.onto = how.onto;
  if (how.op == ReduceOp::sum && narrow_float(how.in) && narrow_float(how.out)) {
    if (how.in == DType::f32) return sum_into<float>(target, places, how, n);
    if (how.in == DType::bf16) return sum_into<bf16>(target, places, how, n);
    return sum_into<f16>(target, places, how, n);
  }
  switch (how.in) {
    case DType::i32:
      return elementwise(target, integers_kernel<std::int32_t, std::uint32_t>, places, how, n);
    case DType::i64:
      return elementwise(target, integers_kernel<std::int64_t, std::uint64_t>, places, how, n);
    case DType::u16:
      return elementwise(target, integers_kernel<std::uint16_t, std::uint32_t>, places, how, n);
    case DType::u8:
      return elementwise(target, integers_kernel<std::uint8_t, std::uint32_t>, places, how, n);
    default:
      return elementwise(target, floats_kernel, places, how, n);
  }
}

}  // namespace sherd::comm::SHERD_CUDA
