#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Threads of a block that takes a row.
constexpr unsigned fold_threads = 256;

template <class Out>
__device__ void write_sum(Compute<Out> sum, Compute<Out> factor, Out* to, bool accumulate) {
  sum = factor * sum;
  *to = narrow<Out>(accumulate ? widen(*to) + sum : sum);
}

/// Sums of runs of `extent` elements that follow each other; a block takes one after the other.
template <class S, class Out>
__global__ void sum_runs_kernel(const S* x, Count runs, Count extent, Compute<Out> factor, Out* out,
                                bool accumulate) {
  for (Count run = blockIdx.x; run < runs; run += gridDim.x) {
    Compute<S> sum = 0;
    for (Count i = threadIdx.x; i < extent; i += blockDim.x) sum = sum + widen(x[run * extent + i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) write_sum(sum, factor, out + run, accumulate);
  }
}

/// Sums of columns, of which a block takes 32 at a time and each of its 8 rows of threads every eighth row.
template <class S, class Out>
__global__ void sum_columns_kernel(const S* x, AxisExtents axis, Compute<Out> factor, Out* out,
                                   bool accumulate) {
  using C = Compute<S>;
  SHERD_SHARED(C, sums, row_lanes * column_lanes);
  const Count across = (axis.inner + column_lanes - 1) / column_lanes;
  for (Count at = blockIdx.x; at < axis.outer * across; at += gridDim.x) {
    const Count outer = at / across, column = at % across * column_lanes + threadIdx.x;
    C sum = 0;
    if (column < axis.inner)
      for (Count k = threadIdx.y; k < axis.extent; k += row_lanes)
        sum = sum + widen(x[(outer * axis.extent + k) * axis.inner + column]);
    __syncthreads();  // until the sums before were read
    sums[threadIdx.y * column_lanes + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= axis.inner) continue;
    for (unsigned y = 1; y < row_lanes; ++y) sum = sum + sums[y * column_lanes + threadIdx.x];
    write_sum(sum, factor, out + outer * axis.inner + column, accumulate);
  }
}

template <class S>
__global__ void max_axis_kernel(const S* x, AxisExtents axis, S* out) {
  for (Count i = grid_thread(); i < axis.outer * axis.inner; i += grid_threads()) {
    const S* from = x + i / axis.inner * axis.extent * axis.inner + i % axis.inner;
    S top = from[0];
    for (Count k = 1; k < axis.extent; ++k) {
      const S element = from[k * axis.inner];
      const auto value = widen(element), most = widen(top);
      if (value > most || (value != value && most == most)) top = element;
    }
    out[i] = top;
  }
}

template <class S>
__global__ void max_axis_backward_kernel(const S* x, const S* y, const S* dy, AxisExtents axis, S* dx) {
  for (Count i = grid_thread(); i < axis.outer * axis.inner; i += grid_threads()) {
    const Count first = i / axis.inner * axis.extent * axis.inner + i % axis.inner;
    const auto most = widen(y[i]);
    bool found = false;
    for (Count k = 0; k < axis.extent; ++k) {
      const auto value = widen(x[first + k * axis.inner]);
      const bool here = !found && (value == most || (value != value && most != most));
      dx[first + k * axis.inner] = here ? dy[i] : narrow<S>(0);
      found = found || here;
    }
  }
}

// ---- softmax ----

/// Reads what softmax takes: a row's scores, the least finite value where a column is hidden or -infinity.
template <class In>
struct SoftmaxScores {
  using C = Compute<In>;
  const In* x;
  Count rows, columns;
  C scale;
  const std::uint8_t* seen;
  Count causal_rows;
  const C* distances;  ///< null: none
  Count distance_rows;

  /// How many columns the row looks at: Softmax::columns_of().
  __device__ Count columns_of(Count row) const {
    if (causal_rows == 0) return columns;
    const Count most = row % causal_rows + 1;
    return most < columns ? most : columns;
  }
  __device__ C at(Count row, Count column) const {
    if (seen && !seen[column]) return lowest<C>;
    C value = widen(x[row * columns + column]) * scale;
    if (distances) value = value + distances[distance_rows - 1 - row % distance_rows + column];
    return value < lowest<C> ? lowest<C> : value;
  }
};

template <class In, class Out>
__global__ void softmax_kernel(SoftmaxScores<In> scores, bool log, Out* y) {
  using C = Compute<In>;
  for (Count row = blockIdx.x; row < scores.rows; row += gridDim.x) {
    const Count visible = scores.columns_of(row);
    C top = lowest<C>, sum = 0;
    for (Count i = threadIdx.x; i < visible; i += blockDim.x) {
      const C value = scores.at(row, i);
      top = value > top || value != value ? value : top;
    }
    top = block_reduce(top, device::SHERD_CUDA::Larger{}, lowest<C>);
    for (Count i = threadIdx.x; i < visible; i += blockDim.x) {
      const C value = scores.at(row, i);
      sum = sum + exp_for<Out>(value - top);
    }
    sum = block_sum(sum);
    const bool none = top == lowest<C>;
    const C factor = none ? C{0} : C{1} / sum;
    const C log_sum = static_cast<C>(::log(static_cast<double>(sum)));
    for (Count i = threadIdx.x; i < scores.columns; i += blockDim.x) {
      C value = 0;
      if (i < visible && log && !none) value = (scores.at(row, i) - top) - log_sum;
      if (i < visible && !log && !none) value = exp_for<Out>(scores.at(row, i) - top) * factor;
      y[row * scores.columns + i] = narrow<Out>(value);
    }
  }
}

/// dx may be y or dy: each element is read by the thread that writes it, behind the block's sum.
template <class S, class Slope>
__global__ void softmax_backward_kernel(const S* y, const Slope* dy, Count rows, Count columns,
                                        Compute<S> scale, bool log, S* dx) {
  using C = Compute<S>;
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    C sum = 0;
    for (Count i = threadIdx.x; i < columns; i += blockDim.x) {
      const C slope = widen(dy[row * columns + i]);
      sum = sum + (log ? slope : widen(y[row * columns + i]) * slope);
    }
    sum = block_sum(sum);
    for (Count i = threadIdx.x; i < columns; i += blockDim.x) {
      const C value = widen(y[row * columns + i]), slope = widen(dy[row * columns + i]);
      const C result = log ? slope - exp_for<S>(value) * sum : value * (slope - sum);
      dx[row * columns + i] = narrow<S>(scale * result);
    }
  }
}

template <class S, class Out>
void sum_as(const Target& target, const Tensor& x, const AxisExtents& axis, double factor, const Tensor& to,
            bool accumulate) {
  const auto by = static_cast<Compute<Out>>(factor);
  if (axis.inner == 1) {
    launch(sum_runs_kernel<S, Out>, blocks_for(axis.outer, 1, target.processors, 16), fold_threads, 0,
           target.stream, in<S>(x), axis.outer, axis.extent, by, out<Out>(to), accumulate);
    return;
  }
  const Count blocks = axis.outer * ((axis.inner + column_lanes - 1) / column_lanes);
  launch(sum_columns_kernel<S, Out>, blocks_for(blocks, 1, target.processors, 16),
         dim3(column_lanes, row_lanes), 0, target.stream, in<S>(x), axis, by, out<Out>(to), accumulate);
}

}  // namespace

void CudaKernels::sum_axis(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out,
                           bool accumulate) {
  check_sum_axis(x, axis, out);
  if (out.numel() == 0) return;
  if (sums_rows(x, axis, factor, out)) return sum_rows(x.reshape({axis.extent, axis.inner}), out, accumulate);
  with_floating(x.dtype(), out.dtype(), [&](auto from, auto to) {
    sum_as<decltype(from), decltype(to)>(target_, x, axis, factor, out, accumulate);
  });
}

void CudaKernels::max_axis(const Tensor& x, const AxisExtents& axis, const Tensor& out) {
  if (axis.kept() == 0) return;
  check_max_axis("max_axis", x, axis, out);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(max_axis_kernel<S>, blocks_for(axis.kept(), element_threads, target_.processors, 32),
           element_threads, 0, target_.stream, in<S>(x), axis, SHERD_CUDA::out<S>(out));
  });
}

void CudaKernels::max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy,
                                    const AxisExtents& axis, const Tensor& dx) {
  if (axis.kept() == 0) return;
  check_max_axis("max_axis_backward", x, axis, y);
  require_alike("max_axis_backward", dx, {&x});
  require_vector("max_axis_backward", "dy", dy, axis.kept(), x.dtype());
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(max_axis_backward_kernel<S>, blocks_for(axis.kept(), element_threads, target_.processors, 32),
           element_threads, 0, target_.stream, in<S>(x), in<S>(y), in<S>(dy), axis, out<S>(dx));
  });
}

void CudaKernels::softmax(const Tensor& x, const Softmax& args, const Tensor& y) {
  check_softmax(x, args, y);
  if (x.numel() == 0) return;
  const Count columns = x.shape().back(), rows = x.shape().rows();
  const std::uint8_t* seen = in_or_null<std::uint8_t>(args.seen);
  with_floating(x.dtype(), [&](auto from) {
    with_floating(y.dtype(), [&](auto to) {
      using In = decltype(from);
      using Out = decltype(to);
      if constexpr (std::is_same_v<In, Out> || std::is_same_v<In, Compute<Out>>) {
        using C = Compute<In>;
        const bool told = args.distances.defined();
        const SoftmaxScores<In> scores{in<In>(x),
                                       rows,
                                       columns,
                                       static_cast<C>(args.scale),
                                       seen,
                                       args.causal_rows,
                                       in_or_null<C>(args.distances),
                                       told ? args.distance_rows(columns) : 0};
        launch(softmax_kernel<In, Out>, blocks_for(rows, 1, target_.processors, 16), fold_threads, 0,
               target_.stream, scores, args.log, out<Out>(y));
      }
    });
  });
}

void CudaKernels::softmax_backward(const Tensor& y, const Tensor& dy, const Softmax& args, const Tensor& dx) {
  check_softmax_backward(y, dy, args, dx);
  if (y.numel() == 0) return;
  const Count columns = y.shape().back(), rows = y.shape().rows();
  with_floating(y.dtype(), [&](auto value) {
    with_floating(dy.dtype(), [&](auto slope) {
      using S = decltype(value);
      using Slope = decltype(slope);
      if constexpr (std::is_same_v<S, Slope> || std::is_same_v<Slope, Compute<S>>)
        launch(softmax_backward_kernel<S, Slope>, blocks_for(rows, 1, target_.processors, 16), fold_threads,
               0, target_.stream, in<S>(y), in<Slope>(dy), rows, columns, static_cast<Compute<S>>(args.scale),
               args.log, out<S>(dx));
    });
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
