#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// sums[block] = Σ w·l, and sums[blocks + block] = Σ w, over the block's elements.
template <class S>
__global__ void loss_kernel(const S* x, const S* t, const S* w, Count n, double* sums) {
  using C = Compute<S>;
  const Count first = Count{blockIdx.x} * squares_per_block;
  const Count end = first + squares_per_block < n ? first + squares_per_block : n;
  double loss = 0, weight = 0;
  for (Count i = first + threadIdx.x; i < end; i += blockDim.x) {
    const C u = widen(x[i]);
    const C term = (u < C{0} ? C{0} : u) - u * widen(t[i]) + log_of_1_plus(exp_for<C>(u < C{0} ? u : -u));
    const double by = w ? static_cast<double>(widen(w[i])) : 1.0;
    loss += by * static_cast<double>(term);
    weight += by;
  }
  loss = block_sum(loss);
  weight = block_sum(weight);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = loss;
  sums[gridDim.x + blockIdx.x] = weight;
}

__global__ void join_kernel(const double* sums, Count blocks, double* total) {
  double loss = 0, weight = 0;
  for (Count i = threadIdx.x; i < blocks; i += blockDim.x) {
    loss += sums[i];
    weight += sums[blocks + i];
  }
  loss = block_sum(loss);
  weight = block_sum(weight);
  if (threadIdx.x == 0) total[0] = loss, total[1] = weight;
}

template <class S, class F>
__global__ void slope_kernel(const S* x, const S* t, const S* w, Count n, const F* factor, S* dx) {
  using C = Compute<S>;
  const C by = static_cast<C>(factor[0]);
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    C slope = sigmoid<C>(widen(x[i])).value - widen(t[i]);
    if (w) slope = slope * widen(w[i]);
    dx[i] = narrow<S>(slope * by);
  }
}

}  // namespace

void CudaKernels::binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                       const Tensor& total) {
  check_binary_cross_entropy("binary_cross_entropy", logits, targets, weights);
  require_vector("binary_cross_entropy", "total", total, 2, DType::f64);
  const Count n = logits.numel(), blocks = (n + squares_per_block - 1) / squares_per_block;
  const Tensor sums = scratch(2 * blocks, DType::f64);
  with_floating(logits.dtype(), [&](auto type) {
    using S = decltype(type);
    if (blocks > 0)
      launch(loss_kernel<S>, static_cast<unsigned>(blocks), element_threads, 0, target_.stream, in<S>(logits),
             in<S>(targets), in_or_null<S>(weights), n, out<double>(sums));
  });
  launch(join_kernel, 1, sum_threads, 0, target_.stream, in<double>(sums), blocks, out<double>(total));
}

void CudaKernels::binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets,
                                                const Tensor& weights, const Tensor& factor,
                                                const Tensor& dx) {
  check_binary_cross_entropy("binary_cross_entropy_backward", logits, targets, weights);
  require_alike("binary_cross_entropy_backward", dx, {&logits});
  require_number("binary_cross_entropy_backward", "the factor", factor);
  if (dx.numel() == 0) return;
  with_floating(dx.dtype(), [&](auto type) {
    using S = decltype(type);
    with_compute_type(factor.dtype(), [&](auto number) {
      using F = decltype(number);
      launch(slope_kernel<S, F>, blocks_for(dx.numel(), element_threads, target_.processors, 32),
             element_threads, 0, target_.stream, in<S>(logits), in<S>(targets), in_or_null<S>(weights),
             dx.numel(), in<F>(factor), out<S>(dx));
    });
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
