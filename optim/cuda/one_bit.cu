#include "optim/cuda/one_bit.h"

#include "device/cuda/launch.cuh"

namespace sherd::optim::SHERD_CUDA {
namespace {

using namespace device::SHERD_CUDA;
using Count = std::int64_t;

constexpr unsigned threads = 256;

/// What rules take from here.
struct Math {
  __device__ static float root(float x) { return ::sqrtf(x); }
};

struct Refreshing {
  FrozenLamb rule;
  const void* grad;
  DType dtype;
  float factor;
  const float* weight;
  float* momentum;
  const float *variance, *fresh_before;
  float* fresh;
  RefreshResults results;
  Count n;
};

__device__ float grad_of(const Refreshing& x, Count i) {
  if (x.dtype == DType::bf16) return widen(static_cast<const bf16*>(x.grad)[i]);
  if (x.dtype == DType::f16) return widen(static_cast<const f16*>(x.grad)[i]);
  return static_cast<const float*>(x.grad)[i];
}

__global__ void __launch_bounds__(threads) refresh_kernel(Refreshing x) {
  SHERD_SHARED(float, tops, threads);
  float top = 0;
  for (Count i = grid_thread(); i < x.n; i += grid_threads()) {
    float m = x.momentum[i], fresh = x.fresh_before[i], direction, update, ratio;
    const float sent = x.rule.beta1 * m + x.rule.one_minus_beta1 * (grad_of(x, i) * x.factor);
    x.rule(Math{}, x.weight[i], sent, m, x.variance[i], fresh, direction, update, ratio);
    x.momentum[i] = m, x.fresh[i] = fresh;
    x.results.directions[i] = direction, x.results.updates[i] = update;
    top = ratio > top ? ratio : top;
  }
  tops[threadIdx.x] = top;
  for (unsigned n = threads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n && tops[threadIdx.x + n] > tops[threadIdx.x])
      tops[threadIdx.x] = tops[threadIdx.x + n];
  }
  // Of numbers that are not negative the larger one has the larger bits.
  if (threadIdx.x == 0)
    atomicMax(reinterpret_cast<unsigned*>(x.results.ratio), bits_as<std::uint32_t>(tops[0]));
}

}  // namespace

void refresh_variance(const Target& target, const FrozenLamb& rule, const SpanUpdate& span,
                      const float* weights, float* fresh, bool first, const RefreshResults& results) {
  const auto* variance = static_cast<const float*>(span.moments[1]);
  const Refreshing x{rule,
                     span.grad,
                     span.grad_dtype,
                     static_cast<float>(span.grad_factor),
                     weights,
                     static_cast<float*>(span.moments[0]),
                     variance,
                     first ? variance : fresh,
                     fresh,
                     results,
                     span.n};
  launch(refresh_kernel, blocks_for(span.n, threads, target.processors, 8), threads, 0, target.stream, x);
}

}  // namespace sherd::optim::SHERD_CUDA
