#include <algorithm>

#include "tensor/cuda/families.cuh"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// A tensor of one number, fp32 or fp64, that kernels read; neither: 1.
struct Factor {
  const float* narrow = nullptr;
  const double* wide = nullptr;
  __device__ double value() const { return wide ? *wide : narrow ? static_cast<double>(*narrow) : 1.0; }
};
Factor factor_of(const Tensor& x) {
  if (x.dtype() == DType::f64) return {.wide = in<double>(x)};
  return {.narrow = in<float>(x)};
}

template <class From, class To>
struct RowCopy {
  const From* from;
  To* to;
  Count rows, columns, from_stride, to_stride;
  bool accumulate;
  Factor factor;
};

/// One element: the sum is formed in double where either type is fp64, and rounds once.
template <class To, class From>
__device__ inline To copied(From x, To old, double factor, bool scaled, bool accumulate) {
  if constexpr (std::is_integral_v<To>) {
    return x;
  } else {
    using C = Compute<std::conditional_t<std::is_same_v<From, double>, From, To>>;
    C value = convert_one<C>(x);
    if (scaled) value = value * static_cast<C>(factor);
    return convert_one<To>(accumulate ? convert_one<C>(old) + value : value);
  }
}

/// Threads of x take `width` columns of a row, threads of y rows.
template <int width, class From, class To>
__global__ void copy_rows_kernel(RowCopy<From, To> a) {
  const bool scaled = a.factor.narrow || a.factor.wide;
  const double factor = a.factor.value();
  for (Count row = Count{blockIdx.y} * blockDim.y + threadIdx.y; row < a.rows;
       row += Count{gridDim.y} * blockDim.y) {
    const From* from = a.from + row * a.from_stride;
    To* to = a.to + row * a.to_stride;
    for (Count at = grid_thread() * width; at < a.columns; at += grid_threads() * width) {
      if (at + width <= a.columns) {
        const Pack<From, width> x = load_pack<width>(from + at);
        Pack<To, width> y{};
        if (a.accumulate) y = load_pack<width>(to + at);
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) y.at[k] = copied<To>(x.at[k], y.at[k], factor, scaled, a.accumulate);
        store_pack(to + at, y);
        continue;
      }
      for (Count i = at; i < a.columns; ++i)
        to[i] = copied<To>(from[i], a.accumulate ? to[i] : To{}, factor, scaled, a.accumulate);
    }
  }
}

template <class From, class To>
void copy_rows_as(const Target& target, const StridedRows& from, const StridedRows& to, Count rows,
                  Count columns, bool accumulate, const Factor& factor) {
  const RowCopy<From, To> a{in<From>(from.tensor) + from.first,
                            out<To>(to.tensor) + to.first,
                            rows,
                            columns,
                            from.stride,
                            to.stride,
                            accumulate,
                            factor};
  constexpr int width = pack_width<std::conditional_t<(sizeof(From) > sizeof(To)), From, To>>;
  const bool packs = aligned_for_packs(a.from, a.to) &&
                     (a.rows == 1 || (a.from_stride % width == 0 && a.to_stride % width == 0));
  const Count items = packs ? (a.columns + width - 1) / width : a.columns;
  unsigned threads = 1;  // of x
  while (threads < element_threads && threads < items) threads *= 2;
  const unsigned lanes = element_threads / threads, x = blocks_for(items, threads, target.processors, 32);
  const Count wanted = std::max<Count>(1, Count{target.processors} * 32 / x);
  const auto y = static_cast<unsigned>(std::min<Count>({(a.rows + lanes - 1) / lanes, wanted, 65535}));
  launch(packs ? copy_rows_kernel<width, From, To> : copy_rows_kernel<1, From, To>, dim3(x, y),
         dim3(threads, lanes), 0, target.stream, a);
}

/// to (+)= from, scaled where there is a factor, between any floating dtypes.
void add_rows(const Target& target, const StridedRows& from, const StridedRows& to, Count rows, Count columns,
              bool accumulate, const Factor& factor) {
  with_floating(from.tensor.dtype(), [&](auto source) {
    with_floating(to.tensor.dtype(), [&](auto result) {
      copy_rows_as<decltype(source), decltype(result)>(target, from, to, rows, columns, accumulate, factor);
    });
  });
}

template <class Out>
__global__ void quotient_kernel(Factor a, Factor b, double factor, Out* out) {
  const double divisor = b.value();
  *out = static_cast<Out>(divisor == 0.0 ? 0.0 : factor * a.value() / divisor);
}

}  // namespace

void CudaKernels::copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows,
                            std::int64_t columns, bool accumulate) {
  check_copy_rows(from, to, rows, columns, accumulate);
  if (rows == 0 || columns == 0) return;
  if (from.stride == columns && to.stride == columns) columns *= rows, rows = 1;  // no gaps
  if (accumulate || from.tensor.dtype() != to.tensor.dtype())
    return add_rows(target_, from, to, rows, columns, accumulate, {});
  with_bits(to.tensor.dtype(), [&](auto zero) {
    using Bits = decltype(zero);  // the same bits, whatever they mean
    copy_rows_as<Bits, Bits>(target_, from, to, rows, columns, false, {});
  });
}

void CudaKernels::add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool accumulate) {
  check_add_scaled(from, factor, to);
  if (to.numel() == 0) return;
  add_rows(target_, {from}, {to}, 1, to.numel(), accumulate, factor_of(factor));
}

void CudaKernels::quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) {
  check_quotient(a, b, out);
  with_compute_type(out.dtype(), [&](auto type) {
    using Out = decltype(type);
    launch(quotient_kernel<Out>, 1, 1, 0, target_.stream, factor_of(a), factor_of(b), factor,
           SHERD_CUDA::out<Out>(out));
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
