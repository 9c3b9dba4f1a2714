#include "tensor/cuda/families.cuh"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Packs of a row that a thread keeps in registers between the passes over it.
constexpr int held = 4;
constexpr unsigned most_threads = 512;
constexpr unsigned most_backward_threads = 256;  ///< that each have registers for what they hold

/// How blocks share rows: a warp per row and four rows per block where rows are short, else a block per row.
struct RowLayout {
  dim3 threads;
  bool fits;  ///< a thread's share of a row fits into `held` packs
  RowLayout(Count packs, Count most) {
    const bool short_rows = packs <= 32 * held;
    Count width = 32;
    while (!short_rows && width < most && width * held < packs) width *= 2;
    threads = short_rows ? dim3(32, 4) : dim3(static_cast<unsigned>(width));
    fits = packs <= width * held;
  }
  Count rows_at_once() const { return threads.y; }
};

/// The sum over the threads that share a row.
template <class C>
__device__ C row_sum(C value) {
  return blockDim.x == 32 ? warp_sum(value) : block_sum(value);
}

/// A row as the threads that share it see it: packs threadIdx.x, threadIdx.x + blockDim.x, …, of which the
/// first `held` stay in registers where all do (`fits`).
template <class S, int width, bool fits>
struct Row {
  const S* from;
  Count packs;
  Pack<S, width> kept[fits ? held : 1];

  __device__ Row(const S* row, Count n) : from(row), packs(n / width) {
    if constexpr (fits) {
      SHERD_UNROLL
      for (int h = 0; h < held; ++h) {
        const Count pack = threadIdx.x + Count{h} * blockDim.x;
        if (pack < packs) kept[h] = load_pack<width>(from + pack * width);
      }
    }
  }
  /// f(pack's elements, index of the first)
  template <class Fn>
  __device__ void each(const Fn& f) const {
    if constexpr (fits) {
      SHERD_UNROLL
      for (int h = 0; h < held; ++h) {
        const Count pack = threadIdx.x + Count{h} * blockDim.x;
        if (pack < packs) f(kept[h], pack * width, h);
      }
    } else {
      for (Count pack = threadIdx.x; pack < packs; pack += blockDim.x)
        f(load_pack<width>(from + pack * width), pack * width, 0);
    }
  }
};

template <class S>
struct NormArguments {
  const S *x, *weight, *bias;
  S* y;
  Compute<S>*mean, *rstd;
  Compute<S> eps;
  Count rows, n;
};

/// LayerNorm (Ba et al. 2016), or with `centre` false RMSNorm (Zhang and Sennrich 2019).
template <class S, int width, bool fits, bool centre>
__global__ void __launch_bounds__(most_threads) norm_kernel(NormArguments<S> a) {
  using C = Compute<S>;
  const C n = static_cast<C>(a.n);
  for (Count r = Count{blockIdx.x} * blockDim.y + threadIdx.y; r < a.rows;
       r += Count{gridDim.x} * blockDim.y) {
    const Row<S, width, fits> row(a.x + r * a.n, a.n);
    C mean = 0;
    if constexpr (centre) {
      C sum = 0;
      row.each([&](const Pack<S, width>& x, Count, int) {
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) sum += widen(x.at[k]);
      });
      mean = row_sum(sum) / n;
    }
    C squares = 0;
    row.each([&](const Pack<S, width>& x, Count, int) {
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C d = widen(x.at[k]) - mean;
        squares += d * d;
      }
    });
    const C root = static_cast<C>(::sqrt(row_sum(squares) / n + a.eps)), rstd = C{1} / root;
    row.each([&](const Pack<S, width>& x, Count at, int) {
      Pack<S, width> weight{}, bias{}, y;
      if (a.weight) weight = load_pack<width>(a.weight + at);
      if (a.bias) bias = load_pack<width>(a.bias + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        C value = (widen(x.at[k]) - mean) * rstd;
        if (a.weight) value = value * widen(weight.at[k]);
        if (a.bias) value = value + widen(bias.at[k]);
        y.at[k] = narrow<S>(value);
      }
      store_pack(a.y + r * a.n + at, y);
    });
    if (threadIdx.x == 0) {
      if constexpr (centre) a.mean[r] = mean;
      a.rstd[r] = rstd;
    }
  }
}

template <class S>
struct NormBackwardArguments {
  const S *x, *weight, *dy;
  const Compute<S>*mean, *rstd;
  S* dx;
  Compute<S>*weight_sums, *bias_sums;  ///< [groups, n] where asked for
  Count rows, n, group;
};

/// dx row by row, and where rows are held in registers, the sums that dweight and dbias are made of: those of
/// group blockIdx.x·blockDim.y + threadIdx.y, whose rows its threads take in order.
template <class S, int width, bool fits, bool centre>
__global__ void __launch_bounds__(most_backward_threads) norm_backward_kernel(NormBackwardArguments<S> a) {
  using C = Compute<S>;
  const Count group = Count{blockIdx.x} * blockDim.y + threadIdx.y, first = group * a.group;
  const Count end = first + a.group < a.rows ? first + a.group : a.rows;
  if (first >= a.rows) return;  // whole warps, or the whole block
  C weight_sums[fits ? held : 1][width] = {}, bias_sums[fits ? held : 1][width] = {};
  for (Count r = first; r < end; ++r) {
    const Row<S, width, fits> x(a.x + r * a.n, a.n), dy(a.dy + r * a.n, a.n);
    const C mean = centre ? a.mean[r] : C{0}, rstd = a.rstd[r];
    C sum = 0, product = 0;
    dy.each([&](const Pack<S, width>& pack, Count at, int h) {
      const Pack<S, width> from = fits ? x.kept[h] : load_pack<width>(x.from + at);
      Pack<S, width> weight{};
      if (a.weight) weight = load_pack<width>(a.weight + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C normal = (widen(from.at[k]) - mean) * rstd, d = widen(pack.at[k]);
        const C g = a.weight ? d * widen(weight.at[k]) : d;
        if constexpr (centre) sum += g;
        product += g * normal;
        if constexpr (fits) {
          weight_sums[h][k] += d * normal;
          if constexpr (centre) bias_sums[h][k] += d;
        }
      }
    });
    if (!a.dx) continue;
    const C scale = C{1} / static_cast<C>(a.n);
    const C average = centre ? row_sum(sum) * scale : C{0}, slope = row_sum(product) * scale;
    dy.each([&](const Pack<S, width>& pack, Count at, int h) {
      const Pack<S, width> from = fits ? x.kept[h] : load_pack<width>(x.from + at);
      Pack<S, width> weight{}, dx;
      if (a.weight) weight = load_pack<width>(a.weight + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C normal = (widen(from.at[k]) - mean) * rstd, d = widen(pack.at[k]);
        const C g = a.weight ? d * widen(weight.at[k]) : d;
        dx.at[k] = narrow<S>((g - average - normal * slope) * rstd);
      }
      store_pack(a.dx + r * a.n + at, dx);
    });
  }
  if constexpr (fits) {
    const Count packs = a.n / width;
    SHERD_UNROLL
    for (int h = 0; h < held; ++h) {
      const Count pack = threadIdx.x + Count{h} * blockDim.x;
      if (pack >= packs) continue;
      for (int k = 0; k < width; ++k) {
        const Count at = group * a.n + pack * width + k;
        if (a.weight_sums) a.weight_sums[at] = weight_sums[h][k];
        if (a.bias_sums) a.bias_sums[at] = bias_sums[h][k];
      }
    }
  }
}

/// The sums of group blockIdx.y, for rows too long to be held: a thread per column.
template <class S>
__global__ void norm_columns_kernel(NormBackwardArguments<S> a) {
  using C = Compute<S>;
  const Count at = grid_thread(), first = Count{blockIdx.y} * a.group;
  const Count end = first + a.group < a.rows ? first + a.group : a.rows;
  if (at >= a.n) return;
  C weight_sum = 0, bias_sum = 0;
  for (Count r = first; r < end; ++r) {
    const C mean = a.mean ? a.mean[r] : C{0}, d = widen(a.dy[r * a.n + at]);
    weight_sum += d * ((widen(a.x[r * a.n + at]) - mean) * a.rstd[r]);
    bias_sum += d;
  }
  if (a.weight_sums) a.weight_sums[blockIdx.y * a.n + at] = weight_sum;
  if (a.bias_sums) a.bias_sums[blockIdx.y * a.n + at] = bias_sum;
}

constexpr unsigned combine_columns = 32, combine_parts = 8;

/// to[i] (+)= the sum of sums[g, i] over g: each of eight threads takes every eighth group, then the eight in
/// order.
template <class C, class T>
__global__ void combine_kernel(const C* sums, Count groups, Count n, T* to, bool accumulate) {
  SHERD_SHARED(C, parts, combine_columns * combine_parts);
  const Count at = Count{blockIdx.x} * combine_columns + threadIdx.x;
  C sum = 0;
  if (at < n)
    for (Count g = threadIdx.y; g < groups; g += combine_parts) sum += sums[g * n + at];
  parts[threadIdx.y * combine_columns + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || at >= n) return;
  for (unsigned part = 1; part < combine_parts; ++part) sum += parts[part * combine_columns + threadIdx.x];
  to[at] = narrow<T>(accumulate ? widen(to[at]) + sum : sum);
}

template <class C>
void combine(const Target& target, const C* sums, Count groups, const Tensor& to, bool accumulate) {
  const Count n = to.numel();
  with_floating(to.dtype(), [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<Compute<T>, C>)
      launch(combine_kernel<C, T>, static_cast<unsigned>((n + combine_columns - 1) / combine_columns),
             dim3(combine_columns, combine_parts), 0, target.stream, sums, groups, n, out<T>(to), accumulate);
  });
}

/// Rows of the pointers that are given can be taken by packs of 16 bytes.
template <class S, class... P>
bool rows_in_packs(Count n, const P*... pointers) {
  return n % pack_width<S> == 0 && aligned_for_packs(pointers...);
}

/// Chooses among the instances of a kernel by how rows are taken; `pick` is called with compile-time width
/// and fits.
template <class S, class Fn>
void with_layout(bool packs, const RowLayout& layout, const Fn& pick) {
  using std::integral_constant;
  const auto with_width = [&](auto width) {
    layout.fits ? pick(width, std::true_type{}) : pick(width, std::false_type{});
  };
  packs ? with_width(integral_constant<int, pack_width<S>>{}) : with_width(integral_constant<int, 1>{});
}

template <class S, bool centre>
void norm_forward(const Target& target, NormArguments<S> a) {
  const bool packs = rows_in_packs<S>(a.n, a.x, a.y, a.weight, a.bias);
  const RowLayout layout(packs ? a.n / pack_width<S> : a.n, most_threads);
  with_layout<S>(packs, layout, [&](auto width, auto fits) {
    launch(norm_kernel<S, width.value, fits.value, centre>,
           blocks_for(a.rows, layout.rows_at_once(), target.processors, 32), layout.threads, 0, target.stream,
           a);
  });
}

template <class S, bool centre>
void norm_backward(const Target& target, NormBackwardArguments<S> a, const Tensor& sums,
                   const Tensor& dweight, const Tensor& dbias, bool accumulate) {
  const bool packs = rows_in_packs<S>(a.n, a.x, a.dy, a.dx, a.weight);
  const RowLayout layout(packs ? a.n / pack_width<S> : a.n, most_backward_threads);
  const Count groups = (a.rows + a.group - 1) / a.group;
  if (sums) {
    auto* at = out<Compute<S>>(sums);
    if (dweight) a.weight_sums = at, at += groups * a.n;
    if (dbias) a.bias_sums = at;
    if (!layout.fits && groups > 0)
      launch(norm_columns_kernel<S>,
             dim3(static_cast<unsigned>((a.n + element_threads - 1) / element_threads),
                  static_cast<unsigned>(groups)),
             element_threads, 0, target.stream, a);
  }
  if (groups > 0 && (a.dx || layout.fits))
    with_layout<S>(packs, layout, [&](auto width, auto fits) {
      launch(norm_backward_kernel<S, width.value, fits.value, centre>,
             static_cast<unsigned>((groups + layout.rows_at_once() - 1) / layout.rows_at_once()),
             layout.threads, 0, target.stream, a);
    });
  if (dweight) combine<Compute<S>>(target, a.weight_sums, groups, dweight, accumulate);
  if (dbias) combine<Compute<S>>(target, a.bias_sums, groups, dbias, accumulate);
}

template <class T>
const T* in_or_null(const Tensor& t) {
  return t ? in<T>(t) : nullptr;
}

template <bool centre>
void any_norm(const Target& target, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
              const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  if (x.numel() == 0) return;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    norm_forward<S, centre>(target, {in<S>(x), in_or_null<S>(weight), in_or_null<S>(bias), out<S>(y),
                                     mean ? out<C>(mean) : nullptr, out<C>(rstd), static_cast<C>(eps),
                                     x.shape().rows(), x.shape().back()});
  });
}

template <bool centre>
void any_norm_backward(const Target& target, const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& dx, const Tensor& dweight,
                       const Tensor& dbias, bool accumulate) {
  const Count rows = x.shape().rows(), width = x.shape().back(), group = rows_per_group(rows);
  const Count parts = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  if (width == 0 || (parts == 0 && !dx)) return;
  Tensor sums;
  if (parts > 0)
    sums = Tensor::empty(target.device, {(rows + group - 1) / group * parts * width}, compute_type(x.dtype()),
                         Category::workspace);
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    norm_backward<S, centre>(target,
                             {in<S>(x), in_or_null<S>(weight), in<S>(dy), in_or_null<C>(mean), in<C>(rstd),
                              dx ? out<S>(dx) : nullptr, nullptr, nullptr, rows, width, group},
                             sums, dweight, dbias, accumulate);
  });
}

}  // namespace

void CudaKernels::layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                             const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_norm("layer_norm", x, weight, bias, rstd);
  require_alike("layer_norm", y, {&x});
  require_vector("layer_norm", "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  any_norm<true>(target_, x, weight, bias, eps, y, mean, rstd);
}

void CudaKernels::layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                                      const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                                      const Tensor& dweight, const Tensor& dbias, bool accumulate) {
  constexpr const char* name = "layer_norm_backward";
  check_norm_backward(name, x, weight, rstd, dy, dx, dweight, dbias);
  require_vector(name, "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  any_norm_backward<true>(target_, x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate);
}

void CudaKernels::rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                           const Tensor& rstd) {
  check_norm("rms_norm", x, weight, {}, rstd);
  require_alike("rms_norm", y, {&x});
  any_norm<false>(target_, x, weight, {}, eps, y, {}, rstd);
}

void CudaKernels::rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                                    const Tensor& dy, const Tensor& dx, const Tensor& dweight,
                                    bool accumulate) {
  check_norm_backward("rms_norm_backward", x, weight, rstd, dy, dx, dweight, {});
  any_norm_backward<false>(target_, x, weight, {}, rstd, dy, dx, dweight, {}, accumulate);
}

}  // namespace sherd::tensor::SHERD_CUDA
