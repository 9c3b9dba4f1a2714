#include "optim/cuda/kernels.h"

#include <algorithm>

#include "optim/cuda/streams.cuh"
#include "optim/isa/span_plan.h"

namespace sherd::optim::SHERD_CUDA {
namespace {

/// A dynamic map (optim/isa/tables.h) as a kernel needs it.
struct Map {
  float base[16], slope[16];
  float begin[DynamicMap::levels], inverse[DynamicMap::levels], offset[DynamicMap::levels],
      top[DynamicMap::levels];
  bool has_signs;

  explicit Map(const DynamicMap& from) : has_signs(from.has_signs) {
    std::copy(std::begin(from.base), std::end(from.base), base);
    std::copy(std::begin(from.slope), std::end(from.slope), slope);
    for (int i = 0; i < DynamicMap::levels; ++i)
      begin[i] = from.begin[i], inverse[i] = from.inverse[i], offset[i] = from.offset[i],
      top[i] = from.top[i];
  }
  __device__ float value(std::uint8_t code) const {
    const int from_middle = has_signs ? code - 127 : code + 1,
              k = from_middle < 0 ? -from_middle : from_middle;
    const int row = (k == 0 ? 32 : __clz(k)) % 16;
    const float size = slope[row] * static_cast<float>(k) + base[row];
    return from_middle < 0 ? -size : size;
  }
  /// The code of a number from -1 to 1.
  __device__ std::uint8_t code(float x) const {
    const float size = bits_as<float>(magnitude(x));
    int level = 0;
    while (level + 1 < DynamicMap::levels && size >= begin[level + 1]) ++level;
    int k = static_cast<int>(::rintf(::fminf(size * inverse[level] + offset[level], top[level])));
    if (!has_signs) return static_cast<std::uint8_t>(k == 0 && x != 0 ? 1 : k);
    if (bits_as<std::uint32_t>(x) >> 31) k = k < 127 ? -k : -127;
    return static_cast<std::uint8_t>(k + 127);
  }
};

/// A span with 8-bit moments.
struct CodedSpan {
  Streams x;
  Common common;
  float* scales[2];
  Map signs, sizes;
  unsigned* not_finite;
};

/// The largest magnitude of a thread block's numbers; shared: as many as threads.
__device__ inline std::uint32_t largest(float mine, std::uint32_t* shared) {
  shared[threadIdx.x] = magnitude(mine);
  for (unsigned n = threads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n && shared[threadIdx.x + n] > shared[threadIdx.x])
      shared[threadIdx.x] = shared[threadIdx.x + n];
  }
  __syncthreads();
  const std::uint32_t out = shared[0];
  __syncthreads();  // until everyone has it
  return out;
}

/// A quantised block of elements for each thread block, in turn.
template <MasterIndex form>
__global__ void __launch_bounds__(threads) update_codes_kernel(Adam rule, CodedSpan span) {
  SHERD_SHARED(std::uint32_t, shared, threads);
  const Streams& x = span.x;
  const Count blocks = (x.n + threads - 1) / threads;
  bool bad = false;
  for (Count b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Count at = b * threads + threadIdx.x;
    const bool mine = at < x.n;
    auto *firsts = static_cast<std::uint8_t*>(x.moments[0]),
         *seconds = static_cast<std::uint8_t*>(x.moments[1]);
    float weight[1] = {}, grad[1] = {}, first = 0, second = 0;
    if (mine) {
      read_gradient(x, span.common.grad_index, at, grad);
      read_master<1, form>(x, at, weight);
      first = span.signs.value(firsts[at]) * span.scales[0][b];
      second = span.sizes.value(seconds[at]) * span.scales[1][b];
      step_element(rule, Math{}, weight[0], grad[0] * span.common.factor, first, second);
      bad |= magnitude(weight[0]) > span.common.largest_weight;
      bad |= magnitude(second) > span.common.largest_moment;
      write_master<1, form>(x, at, weight);
    }
    const auto store = [&](float value, const Map& map, float* scale, std::uint8_t* codes) {
      const float top = bits_as<float>(largest(value, shared));
      const bool any = top >= least_scale;
      if (mine) codes[at] = map.code(value * (any ? 1.0f / top : 0.0f));
      if (threadIdx.x == 0) *scale = any ? top : 0.0f;
    };
    store(first, span.signs, span.scales[0] + b, firsts);
    store(second, span.sizes, span.scales[1] + b, seconds);
  }
  if (bad) atomicOr(span.not_finite, 1u);
}

}  // namespace

void update_codes(const Target& target, const PlannedSpan& planned, unsigned* not_finite) {
  const auto& [plan, span] = planned;
  static_assert(threads == quantized_block);
  const CodedSpan coded{
      streams_of(plan, span, 0),        {plan.grad, plan.factor, plan.largest_weight, plan.largest_moment},
      {span.scales[0], span.scales[1]}, Map(map_of(Code::signed_8bit)),
      Map(map_of(Code::unsigned_8bit)), not_finite};
  const auto run = [&](auto kernel) {
    launch(kernel, blocks_for((span.n + threads - 1) / threads, 1, target.processors, 8), threads, 0,
           target.stream, std::get<Adam>(plan.rule), coded);
  };
  switch (plan.master) {
    case master_alone:
      return run(update_codes_kernel<master_alone>);
    case master_and_bf16:
      return run(update_codes_kernel<master_and_bf16>);
    case master_and_f16:
      return run(update_codes_kernel<master_and_f16>);
    default:
      return run(update_codes_kernel<master_split>);
  }
}

}  // namespace sherd::optim::SHERD_CUDA
