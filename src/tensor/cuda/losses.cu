#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Threads of a block that takes a row of logits.
constexpr unsigned logits_threads = 512;

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
  LossExtents extents;
  DataErrorSlot* wrong;

  /// The row takes part; word of a target that is out of range, whose row does not.
  __device__ bool counts(Count row) const {
    const std::int32_t target = at[row];
    if (target == ignore_index) return false;
    if (target >= 0 && target < extents.ids) return true;
    if (threadIdx.x == 0) raise(wrong, row, target, extents.ids);
    return false;
  }
  /// The column of a row's target that takes part, or -1 where another rank has it.
  __device__ Count column(Count row) const {
    const Count column = at[row] - extents.first;
    return column >= 0 && column < extents.valid ? column : -1;
  }
};

template <class S>
__global__ void cross_entropy_kernel(const S* logits, Targets targets, Compute<S>* lse, Compute<S>* picked,
                                     Compute<S>* most) {
  using C = Compute<S>;
  const LossExtents& e = targets.extents;
  for (Count row = blockIdx.x; row < e.rows; row += gridDim.x) {
    if (!targets.counts(row)) {
      if (threadIdx.x == 0) {
        lse[row] = 0, picked[row] = 0;
        if (most) most[row] = 0;
      }
      continue;
    }
    const S* x = logits + row * e.columns;
    SoftmaxSum<C> mine;
    for_row<S>(x, e.valid, [&](const auto& pack, Count) { add_elements<S>(mine, pack); });
    const C top = block_reduce(mine.top, device::SHERD_CUDA::Larger{}, lowest<C>);
    const C sum = block_sum(mine.sum * exp_for<S>(mine.top - top));
    if (threadIdx.x != 0) continue;
    const Count column = targets.column(row);
    lse[row] =
        e.valid == 0 ? lowest<C> : static_cast<C>(static_cast<double>(top) + ::log(static_cast<double>(sum)));
    picked[row] = column < 0 ? C{0} : widen(x[column]);
    if (most) most[row] = top;
  }
}

/// lse_all[row] = the log-sum-exp of a row over all parts, 0 where it does not count.
template <class C>
__global__ void merge_parts_kernel(const C* lse, Count parts, Count rows, const std::int32_t* targets,
                                   std::int32_t ignore_index, C* lse_all) {
  for (Count row = grid_thread(); row < rows; row += grid_threads()) {
    if (targets[row] == ignore_index || parts == 1) {
      lse_all[row] = targets[row] == ignore_index ? C{0} : lse[row];
      continue;
    }
    C top = lowest<C>;
    for (Count p = 0; p < parts; ++p) top = lse[p * rows + row] > top ? lse[p * rows + row] : top;
    double sum = 0;
    for (Count p = 0; p < parts; ++p)
      sum += ::exp(static_cast<double>(lse[p * rows + row]) - static_cast<double>(top));
    lse_all[row] = static_cast<C>(static_cast<double>(top) + ::log(sum));
  }
}

/// total (+)= {sum of lse_all - logit of the target, rows that count}, in one order of sums. One block.
template <class C>
__global__ void total_kernel(const C* lse_all, const C* picked, Count parts, Count rows,
                             const std::int32_t* targets, std::int32_t ignore_index, double* total,
                             bool accumulate) {
  double sum = 0;
  Count counted = 0;
  for (Count row = threadIdx.x; row < rows; row += blockDim.x) {
    if (targets[row] == ignore_index) continue;
    double at_target = 0;
    for (Count p = 0; p < parts; ++p) at_target += static_cast<double>(picked[p * rows + row]);
    sum += static_cast<double>(lse_all[row]) - at_target;
    ++counted;
  }
  sum = block_sum(sum);
  counted = block_sum(counted);
  if (threadIdx.x != 0) return;
  total[0] = accumulate ? total[0] + sum : sum;
  total[1] = (accumulate ? total[1] : 0) + static_cast<double>(counted);
}

template <class S, class F>
__global__ void cross_entropy_backward_kernel(S* logits, Targets targets, const Compute<S>* lse,
                                              const F* factor) {
  using C = Compute<S>;
  const LossExtents& e = targets.extents;
  const double scale = static_cast<double>(factor[0]);
  const C narrow_scale = static_cast<C>(scale);
  for (Count row = blockIdx.x; row < e.rows; row += gridDim.x) {
    const bool counts = targets.counts(row);
    const Count valid = counts ? e.valid : 0, target = counts ? targets.column(row) : -1;
    const C row_lse = lse[row];
    S* x = logits + row * e.columns;
    for_row<S>(x, e.columns, [&](auto pack, Count first) {
      constexpr int width = sizeof(pack.at) / sizeof(S);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C value = widen(pack.at[k]);
        C slope = first + k < valid ? exp_for<S>(value - row_lse) * narrow_scale : C{0};
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

void CudaKernels::cross_entropy(const Tensor& logits, const Tensor& targets, const VocabSlice& slice,
                                std::int32_t ignore_index, const Tensor& lse, const Tensor& picked,
                                const Tensor& most) {
  const LossExtents e = check_cross_entropy("cross_entropy", logits, targets, lse, slice);
  require_vector("cross_entropy", "picked", picked, e.rows, compute_type(logits.dtype()));
  if (most) require_vector("cross_entropy", "most", most, e.rows, compute_type(logits.dtype()));
  if (e.rows == 0) return;
  const Targets wanted{in<std::int32_t>(targets), ignore_index, e, errors_.slot(DataError::loss_target)};
  with_floating(logits.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    launch(cross_entropy_kernel<S>, blocks_for(e.rows, 1, target_.processors, 16), logits_threads, 0,
           target_.stream, in<S>(logits), wanted, out<C>(lse), out<C>(picked), most ? out<C>(most) : nullptr);
  });
}

void CudaKernels::cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                                      std::int32_t ignore_index, const Tensor& lse_all, const Tensor& total,
                                      bool accumulate) {
  const Count parts = check_cross_entropy_total(lse, picked, targets, lse_all, total);
  const Count rows = targets.numel();
  const std::int32_t* target = in<std::int32_t>(targets);
  with_compute_type(lse.dtype(), [&](auto type) {
    using C = decltype(type);
    if (rows > 0)
      launch(merge_parts_kernel<C>, blocks_for(rows, element_threads, target_.processors, 32),
             element_threads, 0, target_.stream, in<C>(lse), parts, rows, target, ignore_index,
             out<C>(lse_all));
    launch(total_kernel<C>, 1, sum_threads, 0, target_.stream, in<C>(lse_all), in<C>(picked), parts, rows,
           target, ignore_index, out<double>(total), accumulate);
  });
}

void CudaKernels::cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                         const VocabSlice& slice, std::int32_t ignore_index,
                                         const Tensor& factor) {
  const LossExtents e = check_cross_entropy("cross_entropy_backward", logits, targets, lse, slice);
  require_number("cross_entropy_backward", "the factor", factor);
  if (e.rows == 0) return;
  const Targets wanted{in<std::int32_t>(targets), ignore_index, e, errors_.slot(DataError::loss_target)};
  with_floating(logits.dtype(), [&](auto type) {
    using S = decltype(type);
    with_compute_type(factor.dtype(), [&](auto number) {
      using F = decltype(number);
      launch(cross_entropy_backward_kernel<S, F>, blocks_for(e.rows, 1, target_.processors, 16), logits_threads,
             0, target_.stream, out<S>(logits), wanted, in<Compute<S>>(lse), in<F>(factor));
    });
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
