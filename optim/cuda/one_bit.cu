#include "optim/cuda/kernels.h"

#include "optim/cuda/streams.cuh"

namespace sherd::optim::SHERD_CUDA {
namespace {

constexpr unsigned warp = 32;
constexpr Count word = 64;

/// Elements up to the end of the last word of signs: whole warps go through them together.
__host__ __device__ Count whole_words(Count n) {
  return (n + word - 1) / word * word;
}

/// Writes element i's sign, as a part of its half of a word of signs. Its warp calls together.
__device__ void put_sign(std::uint32_t* signs, Count i, bool negative) {
  const unsigned half = __ballot_sync(all_lanes, negative);
  if (i % warp == 0) signs[i / warp] = half;
}
__device__ float signed_by(const std::uint32_t* signs, Count i, float scale) {
  return signs[i / warp] >> (i % warp) & 1u ? -scale : scale;
}
__device__ float settled(float error, float scale) {
  return error - (error < 0.0f ? -scale : scale);
}

__device__ float grad_of(const void* grads, DType dtype, Count i) {
  if (dtype == DType::bf16) return widen(static_cast<const bf16*>(grads)[i]);
  if (dtype == DType::f16) return widen(static_cast<const f16*>(grads)[i]);
  return static_cast<const float*>(grads)[i];
}

struct CompressArguments {
  const void* grad;
  DType dtype;
  float factor, beta, one_minus_beta;
  const float* momentum;
  float* error;
  std::uint32_t* signs;
  Count n;
};

__global__ void __launch_bounds__(threads) compress_kernel(CompressArguments x) {
  for (Count i = grid_thread(); i < whole_words(x.n); i += grid_threads()) {
    float sum = 0;
    if (i < x.n) {
      sum = x.beta * x.momentum[i] + x.one_minus_beta * (grad_of(x.grad, x.dtype, i) * x.factor) + x.error[i];
      x.error[i] = sum;
    }
    put_sign(x.signs, i, sum < 0.0f);
  }
}

struct Averaging {
  const std::byte* signs;
  const std::byte* scales;
  Count stride;
  int replicas;
  float* error;
  std::uint32_t* result;
  Count n;
};

__global__ void __launch_bounds__(threads) average_kernel(Averaging x) {
  const float part = 1.0f / static_cast<float>(x.replicas);
  for (Count i = grid_thread(); i < whole_words(x.n); i += grid_threads()) {
    float mean = 0;
    if (i < x.n) {
      float sum = 0;
      for (int replica = 0; replica < x.replicas; ++replica) {
        const auto* signs = reinterpret_cast<const std::uint32_t*>(x.signs + replica * x.stride);
        const float scale = *reinterpret_cast<const float*>(x.scales + replica * x.stride);
        sum = sum + signed_by(signs, i, scale);
      }
      mean = sum * part + x.error[i];
      x.error[i] = mean;
    }
    put_sign(x.result, i, mean < 0.0f);
  }
}

__global__ void settle_kernel(float* error, float scale, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) error[i] = settled(error[i], scale);
}

/// The momentum that replicas agreed on.
struct Agreed {
  const std::uint32_t* signs;
  float scale;
  float* error;
  float settled;
  Count first;
  __host__ explicit Agreed(const AgreedMomentum& from)
      : signs(reinterpret_cast<const std::uint32_t*>(from.signs)),
        scale(from.scale),
        error(from.error),
        settled(from.settled),
        first(from.first_bit) {}
  /// Element i's momentum; its error settles, or is none where the element does not vary.
  __device__ float take(Count i, bool varies) const {
    error[i] = varies ? SHERD_CUDA::settled(error[i], settled) : 0.0f;
    return signed_by(signs, first + i, scale);
  }
};

__global__ void take_kernel(Agreed agreed, const float* variance, float* momentum, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    const float v = variance[i], sent = agreed.take(i, v > 0.0f);
    momentum[i] = v > 0.0f ? sent : 0.0f;
  }
}

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

/// `agreed`: its signs are null where momentum comes from gradients.
__global__ void __launch_bounds__(threads) refresh_kernel(Refreshing x, Agreed agreed) {
  SHERD_SHARED(float, tops, threads);
  float top = 0;
  for (Count i = grid_thread(); i < x.n; i += grid_threads()) {
    float m = x.momentum[i], fresh = x.fresh_before[i], direction, update, ratio;
    const float v = x.variance[i];
    const float sent =
        agreed.signs ? agreed.take(i, v > 0.0f)
                     : x.rule.beta1 * m + x.rule.one_minus_beta1 * (grad_of(x.grad, x.dtype, i) * x.factor);
    x.rule(Math{}, x.weight[i], sent, m, v, fresh, direction, update, ratio);
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
  // The larger of two numbers that are not negative has the larger bits.
  if (threadIdx.x == 0)
    atomicMax(reinterpret_cast<unsigned*>(x.results.ratio), bits_as<std::uint32_t>(tops[0]));
}

template <class Kernel, class... Args>
void queue(const Target& target, Count n, Kernel kernel, Args... args) {
  if (n > 0) launch(kernel, blocks_for(n, threads, target.processors), threads, 0, target.stream, args...);
}

}  // namespace

void compress_momentum(const Target& target, const MomentumSpan& span) {
  const CompressArguments x{span.grad,
                            span.grad_dtype,
                            static_cast<float>(span.grad_factor),
                            static_cast<float>(span.beta1),
                            static_cast<float>(1 - span.beta1),
                            span.momentum,
                            span.error,
                            reinterpret_cast<std::uint32_t*>(span.signs),
                            span.n};
  queue(target, whole_words(span.n), compress_kernel, x);
}

void average_momentum(const Target& target, const SentMomentum& sent, float* error, std::uint64_t* result,
                      std::int64_t n) {
  const Averaging x{reinterpret_cast<const std::byte*>(sent.signs),
                    reinterpret_cast<const std::byte*>(sent.scale),
                    sent.stride,
                    sent.replicas,
                    error,
                    reinterpret_cast<std::uint32_t*>(result),
                    n};
  queue(target, whole_words(n), average_kernel, x);
}

void settle_error(const Target& target, float* error, float scale, std::int64_t n) {
  queue(target, n, settle_kernel, error, scale, n);
}

void take_momentum(const Target& target, const AgreedMomentum& agreed, const float* variance, float* momentum,
                   std::int64_t n) {
  queue(target, n, take_kernel, Agreed(agreed), variance, momentum, n);
}

void refresh_variance(const Target& target, const FrozenLamb& rule, const SpanUpdate& span,
                      const AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                      const RefreshResults& results) {
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
  queue(target, span.n, refresh_kernel, x, Agreed(agreed ? *agreed : AgreedMomentum()));
}

}  // namespace sherd::optim::SHERD_CUDA
