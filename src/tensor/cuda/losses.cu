#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Threads of a block that takes a row of logits.
constexpr unsigned row_threads = 512;
/// Threads of the one block that adds up what the others left.
constexpr unsigned sum_threads = 1024;

/// f(elements, index of the first) over the calling thread's part of row[0, n): packs of 16 bytes where the
/// row is aligned, and single elements before and behind them.
template <class S, class Row, class Fn>
__device__ void for_row(Row* row, Count n, const Fn& f) {
  constexpr int width = pack_width<S>;
  const Count misaligned = static_cast<Count>(reinterpret_cast<std::uintptr_t>(row) / sizeof(S)) % width;
  Count head = misaligned == 0 ? 0 : width - misaligned;
  if (head > n) head = n;
  const Count packs = (n - head) / width, tail = head + packs * width;
  if (threadIdx.x < head) f(load_pack<1>(row + threadIdx.x), Count{threadIdx.x});
  for (Count pack = threadIdx.x; pack < packs; pack += blockDim.x)
    f(load_pack<width>(row + head + pack * width), head + pack * width);
  if (threadIdx.x < n - tail) f(load_pack<1>(row + tail + threadIdx.x), tail + threadIdx.x);
}

/// The least finite value, from where maxima begin: differences with it are -infinity, never NaN.
template <class C>
constexpr C lowest = std::is_same_v<C, double> ? static_cast<C>(-0x1.fffffffffffffp1023)
                                               : static_cast<C>(-0x1.fffffep127);

template <class C>
struct SoftmaxSum {
  C top = lowest<C>, sum = 0;  ///< Σ e^(x - top)
};

/// Takes the elements into the sum, whose reference is raised where one of them is above it (Milakov and
/// Gimelshein 2018). A NaN makes it NaN.
template <class S, int width>
__device__ void add_elements(SoftmaxSum<Compute<S>>& s, const Pack<S, width>& x) {
  using C = Compute<S>;
  C values[width], top = s.top;
  SHERD_UNROLL
  for (int k = 0; k < width; ++k) {
    values[k] = widen(x.at[k]);
    top = values[k] > top ? values[k] : top;
  }
  if (top > s.top) {
    s.sum = s.sum * exp_for<S>(s.top - top);
    s.top = top;
  }
  SHERD_UNROLL
  for (int k = 0; k < width; ++k) s.sum += exp_for<S>(values[k] - top);
}

struct Targets {
  const std::int32_t* at;
  std::int32_t ignore_index;
  Count valid;
  DataErrorSlot* wrong;

  __device__ bool counts(Count row) const { return at[row] != ignore_index; }
  /// The row's target, or -1 where it takes no part; word of one that is out of range.
  __device__ Count of(Count row) const {
    const std::int32_t target = at[row];
    if (target == ignore_index) return -1;
    if (target >= 0 && target < valid) return target;
    if (threadIdx.x == 0) raise(wrong, row, target, valid);
    return -1;
  }
};

/// lse[row], and terms[row] = lse - logit of the target.
template <class S>
__global__ void cross_entropy_kernel(const S* logits, Count rows, Count vocab, Targets targets,
                                     Compute<S>* lse, double* terms) {
  using C = Compute<S>;
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const Count target = targets.of(row);
    if (target < 0) {
      if (threadIdx.x == 0) lse[row] = 0, terms[row] = 0;
      continue;
    }
    const S* x = logits + row * vocab;
    SoftmaxSum<C> mine;
    for_row<S>(x, targets.valid, [&](const auto& pack, Count) { add_elements<S>(mine, pack); });
    const C top = block_reduce(mine.top, device::SHERD_CUDA::Larger{}, lowest<C>);
    const C sum = block_sum(mine.sum * exp_for<S>(mine.top - top));
    if (threadIdx.x != 0) continue;
    const C result = static_cast<C>(static_cast<double>(top) + ::log(static_cast<double>(sum)));
    lse[row] = result;
    terms[row] = static_cast<double>(result) - static_cast<double>(widen(x[target]));
  }
}

/// How many targets take part. One block.
__device__ inline Count count_targets(Count rows, const Targets& targets) {
  Count counted = 0;
  for (Count row = threadIdx.x; row < rows; row += blockDim.x) counted += targets.counts(row) ? 1 : 0;
  return block_sum(counted);
}

/// loss = the sum of terms over how many count, one order of sums. One block.
template <class C>
__global__ void mean_term_kernel(const double* terms, Count rows, Targets targets, C* loss) {
  double sum = 0;
  for (Count row = threadIdx.x; row < rows; row += blockDim.x) sum += terms[row];
  sum = block_sum(sum);
  const Count counted = count_targets(rows, targets);
  if (threadIdx.x == 0) loss[0] = counted == 0 ? C{0} : static_cast<C>(sum / static_cast<double>(counted));
}

/// scale = dloss over how many targets count. One block.
template <class C>
__global__ void gradient_scale_kernel(Count rows, Targets targets, const C* dloss, double* scale) {
  const Count counted = count_targets(rows, targets);
  if (threadIdx.x == 0)
    scale[0] = counted == 0 ? 0 : static_cast<double>(dloss[0]) / static_cast<double>(counted);
}

template <class S>
__global__ void cross_entropy_backward_kernel(S* logits, Count rows, Count vocab, Targets targets,
                                              const Compute<S>* lse, const double* scales) {
  using C = Compute<S>;
  const double scale = scales[0];
  const C narrow_scale = static_cast<C>(scale);
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const Count target = targets.of(row);
    const C row_lse = lse[row];
    S* x = logits + row * vocab;
    for_row<S>(x, vocab, [&](auto pack, Count first) {
      constexpr int width = sizeof(pack.at) / sizeof(S);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const bool counts = target >= 0 && first + k < targets.valid;
        const C value = widen(pack.at[k]);
        C slope = counts ? exp_for<S>(value - row_lse) * narrow_scale : C{0};
        // expm1 keeps the digits of a target whose probability is near 1.
        if (first + k == target)
          slope = static_cast<C>(::expm1(static_cast<double>(value) - static_cast<double>(row_lse)) * scale);
        pack.at[k] = narrow<S>(slope);
      }
      store_pack(x + first, pack);
    });
  }
}

template <class S>
__global__ void squared_difference_kernel(const S* x, const S* y, Count n, double* sums) {
  using C = Compute<S>;
  const Count first = Count{blockIdx.x} * squares_per_block;
  const Count end = first + squares_per_block < n ? first + squares_per_block : n;
  double sum = 0;
  for (Count i = first + threadIdx.x; i < end; i += blockDim.x) {
    const C d = widen(x[i]) - widen(y[i]);
    sum += static_cast<double>(d * d);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class C>
__global__ void mean_kernel(const double* sums, Count count, Count n, C* loss) {
  double sum = 0;
  for (Count i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) loss[0] = n == 0 ? C{0} : static_cast<C>(sum / static_cast<double>(n));
}

/// scale = 2·dloss / n. One thread.
template <class C>
__global__ void difference_scale_kernel(const C* dloss, Count n, C* scale) {
  scale[0] = static_cast<C>(2 * static_cast<double>(dloss[0]) / static_cast<double>(n));
}

template <class C>
struct ScaledDifference {
  const C* scale;
  __device__ C operator()(C x, C y) const { return (x - y) * scale[0]; }
};

}  // namespace

void CudaKernels::cross_entropy(const Tensor& logits, const Tensor& targets, std::int64_t valid,
                                std::int32_t ignore_index, const Tensor& loss, const Tensor& lse) {
  const Count columns = check_cross_entropy("cross_entropy", logits, targets, lse, valid);
  require_vector("cross_entropy", "loss", loss, 1, compute_type(logits.dtype()));
  const Count vocab = logits.shape().back(), rows = logits.shape().rows();
  const Targets wanted{in<std::int32_t>(targets), ignore_index, columns,
                       errors_.slot(DataError::loss_target)};
  const Tensor terms = scratch(rows, DType::f64);
  with_floating(logits.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    if (rows > 0)
      launch(cross_entropy_kernel<S>, blocks_for(rows, 1, target_.processors, 16), row_threads, 0,
             target_.stream, in<S>(logits), rows, vocab, wanted, out<C>(lse), out<double>(terms));
    launch(mean_term_kernel<C>, 1, sum_threads, 0, target_.stream, in<double>(terms), rows, wanted,
           out<C>(loss));
  });
}

void CudaKernels::cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                         std::int64_t valid, std::int32_t ignore_index, const Tensor& dloss) {
  const Count columns = check_cross_entropy("cross_entropy_backward", logits, targets, lse, valid);
  require_vector("cross_entropy_backward", "dloss", dloss, 1, compute_type(logits.dtype()));
  const Count vocab = logits.shape().back(), rows = logits.shape().rows();
  if (rows == 0) return;
  const Targets wanted{in<std::int32_t>(targets), ignore_index, columns,
                       errors_.slot(DataError::loss_target)};
  const Tensor scale = scratch(1, DType::f64);
  with_floating(logits.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(gradient_scale_kernel<Compute<S>>, 1, sum_threads, 0, target_.stream, rows, wanted,
           in<Compute<S>>(dloss), out<double>(scale));
    launch(cross_entropy_backward_kernel<S>, blocks_for(rows, 1, target_.processors, 16), row_threads, 0,
           target_.stream, out<S>(logits), rows, vocab, wanted, in<Compute<S>>(lse), in<double>(scale));
  });
}

void CudaKernels::mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) {
  require_alike("mean_squared_error", x, {&y});
  require_vector("mean_squared_error", "loss", loss, 1, compute_type(x.dtype()));
  const Count n = x.numel(), blocks = (n + squares_per_block - 1) / squares_per_block;
  const Tensor sums = scratch(blocks, DType::f64);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    if (blocks > 0)
      launch(squared_difference_kernel<S>, static_cast<unsigned>(blocks), element_threads, 0, target_.stream,
             in<S>(x), in<S>(y), n, out<double>(sums));
    launch(mean_kernel<C>, 1, sum_threads, 0, target_.stream, in<double>(sums), blocks, n, out<C>(loss));
  });
}

void CudaKernels::mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                              const Tensor& dx) {
  require_alike("mean_squared_error_backward", dx, {&x, &y});
  require_vector("mean_squared_error_backward", "dloss", dloss, 1, compute_type(dx.dtype()));
  if (dx.numel() == 0) return;
  const Tensor scale = scratch(1, compute_type(dx.dtype()));
  with_floating(dx.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    launch(difference_scale_kernel<C>, 1, 1, 0, target_.stream, in<C>(dloss), dx.numel(), out<C>(scale));
    map(target_, ScaledDifference<C>{in<C>(scale)}, dx.numel(), out<S>(dx), in<S>(x), in<S>(y));
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
