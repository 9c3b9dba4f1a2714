#include "tensor/cuda/join_parts.cuh"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Packs of a row that a thread keeps in registers between the passes over it.
constexpr int held = 4;
/// Threads of a block at most, and its warps where each takes a row of its own.
constexpr unsigned most_threads = 512, forward_warps = 4;
constexpr unsigned most_backward_threads = 256, backward_warps = 8;

/// Blocks that a processor has registers for at least; what widens fp16 takes too many.
template <class S>
constexpr int backward_blocks = std::is_same_v<S, f16> ? 1 : 2;

/// How blocks share rows: a warp per row and `warps` rows per block where rows are short, else a block per
/// row.
struct RowLayout {
  dim3 threads;
  bool fits;  ///< a thread's share of a row fits into `held` packs
  RowLayout(Count packs, Count most, unsigned warps) {
    const bool short_rows = packs <= 32 * held;
    Count width = 32;
    while (!short_rows && width < most && width * held < packs) width *= 2;
    threads = short_rows ? dim3(32, warps) : dim3(static_cast<unsigned>(width));
    fits = packs <= width * held;
  }
  Count rows_at_once() const { return threads.y; }
};

/// The sum over the threads that share a row.
template <class C>
__device__ C row_sum(C value) {
  return blockDim.x == 32 ? warp_sum(value) : block_sum(value);
}

/// A pack as it lies in registers: two of 16 bits to a word, where a struct's elements would take one each.
template <class S, int width>
using PackedRow = std::conditional_t<sizeof(S) * width == 16, Pack<std::uint32_t, 4>, Pack<S, width>>;

template <class S, int width>
__device__ PackedRow<S, width> load_packed(const S* from) {
  return bits_as<PackedRow<S, width>>(load_pack<width>(from));
}
template <class S, int width>
__device__ Pack<S, width> unpacked(const PackedRow<S, width>& kept) {
  if constexpr (sizeof(S) == 2 && width == 8) {
    Pack<S, width> out;
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) out.at[k].bits = static_cast<std::uint16_t>(kept.at[k / 2] >> k % 2 * 16);
    return out;
  } else {
    return bits_as<Pack<S, width>>(kept);
  }
}

/// A row as the threads that share it see it: packs threadIdx.x, threadIdx.x + blockDim.x, …, of which the
/// first `held` stay in registers where all do (`fits`).
template <class S, int width, bool fits>
struct NormRow {
  const S* from;
  std::conditional_t<fits, unsigned, Count> packs;
  PackedRow<S, width> kept[fits ? held : 1];

  __device__ NormRow(const S* row, Count n) : from(row), packs(static_cast<decltype(packs)>(n / width)) {
    if constexpr (fits) {
      SHERD_UNROLL
      for (int h = 0; h < held; ++h) {
        const unsigned index = threadIdx.x + h * blockDim.x;
        if (index < packs) kept[h] = load_packed<S, width>(from + index * width);
      }
    }
  }
  __device__ Pack<S, width> pack(Count at, int h) const {
    if constexpr (fits)
      return unpacked<S, width>(kept[h]);
    else
      return load_pack<width>(from + at);
  }
  /// f(pack's elements, index of the first)
  template <class Fn>
  __device__ void each(const Fn& f) const {
    if constexpr (fits) {
      SHERD_UNROLL
      for (int h = 0; h < held; ++h) {
        const unsigned index = threadIdx.x + h * blockDim.x;
        if (index < packs) f(pack(index * width, h), index * width, h);
      }
    } else {
      for (Count index = threadIdx.x; index < packs; index += blockDim.x)
        f(pack(index * width, 0), index * width, 0);
    }
  }
};

template <class S>
struct NormArguments {
  const S *x, *weight, *bias;
  S* y;
  Compute<S>*mean, *rstd;
  Compute<S> eps, shift;
  Count rows, n;
};

/// LayerNorm (Ba et al. 2016), or with `centre` false RMSNorm (Zhang and Sennrich 2019).
template <class S, int width, bool fits, bool centre>
__global__ void __launch_bounds__(most_threads) norm_kernel(NormArguments<S> a) {
  using C = Compute<S>;
  const C n = static_cast<C>(a.n);
  for (Count r = Count{blockIdx.x} * blockDim.y + threadIdx.y; r < a.rows;
       r += Count{gridDim.x} * blockDim.y) {
    const NormRow<S, width, fits> row(a.x + r * a.n, a.n);
    C mean = 0;
    if constexpr (centre) {
      C sum = 0;
      row.each([&](const Pack<S, width>& x, auto, int) {
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) sum += widen(x.at[k]);
      });
      mean = row_sum(sum) / n;
    }
    C squares = 0;
    row.each([&](const Pack<S, width>& x, auto, int) {
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C d = widen(x.at[k]) - mean;
        squares += d * d;
      }
    });
    const C root = static_cast<C>(::sqrt(row_sum(squares) / n + a.eps)), rstd = C{1} / root;
    row.each([&](const Pack<S, width>& x, auto at, int) {
      Pack<S, width> weight{}, bias{}, y;
      if (a.weight) weight = load_pack<width>(a.weight + at);
      if (a.bias) bias = load_pack<width>(a.bias + at);
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        C value = (widen(x.at[k]) - mean) * rstd;
        if (a.weight) value = value * (widen(weight.at[k]) + a.shift);
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
  bool onto_dx;
  Compute<S>*weight_sums, *bias_sums;  ///< [groups, n] where asked for
  Count rows, n, group;
  Compute<S> shift;
  Compute<S> scale = Compute<S>{1} / static_cast<Compute<S>>(n);

  Count groups() const { return (rows + group - 1) / group; }
};

/// Writes to[n], the sums of a block's rows of threads: where there are several, added up in order.
template <int width, class C>
__device__ void write_block_sums(const Pack<C, width> (&sums)[held], Count n, C* to) {
  using Sums = Pack<C, width>;
  SHERD_SHARED(Sums, shared, backward_warps * 32 * held);
  const bool several = blockDim.y > 1;
  const auto packs = static_cast<unsigned>(n / width);
  if (several) __syncthreads();  // until what was here before has been read
  SHERD_UNROLL
  for (int h = 0; h < held; ++h) {
    const unsigned index = threadIdx.x + h * blockDim.x;
    if (index >= packs) continue;
    if (several)
      shared[threadIdx.y * packs + index] = sums[h];
    else
      store_pack(to + index * width, sums[h]);
  }
  if (!several) return;
  __syncthreads();
  for (unsigned index = threadIdx.y * 32 + threadIdx.x; index < packs; index += 32 * backward_warps) {
    Sums sum = shared[index];
    for (unsigned y = 1; y < backward_warps; ++y)
      for (int k = 0; k < width; ++k) sum.at[k] += shared[y * packs + index].at[k];
    store_pack(to + index * width, sum);
  }
}

/// dx of the rows of group blockIdx.x, which the block's rows of threads take in turns, and where they are
/// held in registers, the sums over the group that dweight and dbias are made of.
template <class S, int width, bool fits, bool centre>
__global__ void __launch_bounds__(most_backward_threads, backward_blocks<S>)
    norm_backward_kernel(NormBackwardArguments<S> a) {
  using C = Compute<S>;
  const Count first = blockIdx.x * a.group;
  const Count end = first + a.group < a.rows ? first + a.group : a.rows;
  Pack<C, width> weight_sums[fits ? held : 1] = {}, bias_sums[fits ? held : 1] = {};
  for (Count r = first + threadIdx.y; r < end; r += blockDim.y) {
    const NormRow<S, width, fits> x(a.x + r * a.n, a.n), dy(a.dy + r * a.n, a.n);
    const C mean = centre ? a.mean[r] : C{0}, rstd = a.rstd[r];
    C sum = 0, product = 0;
    dy.each([&](const Pack<S, width>& pack, auto at, int h) {
      const Pack<S, width> from = x.pack(at, h);
      Pack<S, width> weight{};
      if (a.weight) weight = unpacked<S, width>(load_packed<S, width>(a.weight + at));
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C normal = (widen(from.at[k]) - mean) * rstd, d = widen(pack.at[k]);
        const C g = a.weight ? d * (widen(weight.at[k]) + a.shift) : d;
        if constexpr (centre) sum += g;
        product += g * normal;
        if constexpr (fits) {
          weight_sums[h].at[k] += d * normal;
          if constexpr (centre) bias_sums[h].at[k] += d;
        }
      }
    });
    if (!a.dx) continue;
    const C average = centre ? row_sum(sum) * a.scale : C{0}, slope = row_sum(product) * a.scale;
    dy.each([&](const Pack<S, width>& pack, auto at, int h) {
      const Pack<S, width> from = x.pack(at, h);
      Pack<S, width> weight{}, dx;
      if (a.weight) weight = unpacked<S, width>(load_packed<S, width>(a.weight + at));
      SHERD_UNROLL
      for (int k = 0; k < width; ++k) {
        const C normal = (widen(from.at[k]) - mean) * rstd, d = widen(pack.at[k]);
        const C g = a.weight ? d * (widen(weight.at[k]) + a.shift) : d;
        dx.at[k] = narrow<S>((g - average - normal * slope) * rstd);
      }
      if (a.onto_dx) {
        const Pack<S, width> old = unpacked<S, width>(load_packed<S, width>(a.dx + r * a.n + at));
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) dx.at[k] = narrow<S>(widen(old.at[k]) + widen(dx.at[k]));
      }
      store_pack(a.dx + r * a.n + at, dx);
    });
  }
  if constexpr (fits) {
    if (a.weight_sums) write_block_sums(weight_sums, a.n, a.weight_sums + blockIdx.x * a.n);
    if (a.bias_sums) write_block_sums(bias_sums, a.n, a.bias_sums + blockIdx.x * a.n);
  }
}

/// The sums of group blockIdx.y, for rows too long to be held: a thread per `width` columns.
template <class S, int width>
__global__ void norm_columns_kernel(NormBackwardArguments<S> a) {
  using C = Compute<S>;
  const Count at = grid_thread() * width, first = Count{blockIdx.y} * a.group;
  const Count end = first + a.group < a.rows ? first + a.group : a.rows;
  if (at >= a.n) return;
  Pack<C, width> weight_sums{}, bias_sums{};
  for (Count r = first; r < end; ++r) {
    const Pack<S, width> x = load_pack<width>(a.x + r * a.n + at), dy = load_pack<width>(a.dy + r * a.n + at);
    const C mean = a.mean ? a.mean[r] : C{0}, rstd = a.rstd[r];
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) {
      const C d = widen(dy.at[k]);
      weight_sums.at[k] += d * ((widen(x.at[k]) - mean) * rstd);
      bias_sums.at[k] += d;
    }
  }
  if (a.weight_sums) store_pack(a.weight_sums + blockIdx.y * a.n + at, weight_sums);
  if (a.bias_sums) store_pack(a.bias_sums + blockIdx.y * a.n + at, bias_sums);
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
  const RowLayout layout(packs ? a.n / pack_width<S> : a.n, most_threads, forward_warps);
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
  const RowLayout layout(packs ? a.n / pack_width<S> : a.n, most_backward_threads, backward_warps);
  const Count groups = a.groups();
  auto* parts = sums ? out<Compute<S>>(sums) : nullptr;
  if (dweight) a.weight_sums = parts;
  if (dbias) a.bias_sums = parts + (dweight ? groups * a.n : 0);
  if (groups > 0)
    with_layout<S>(packs, layout, [&](auto width, auto fits) {
      const Count column_threads = a.n / width.value;
      const auto blocks = static_cast<unsigned>(groups);
      if (sums && !fits.value)
        launch(norm_columns_kernel<S, width.value>,
               dim3(static_cast<unsigned>((column_threads + element_threads - 1) / element_threads), blocks),
               element_threads, 0, target.stream, a);
      if (a.dx || fits.value)
        launch(norm_backward_kernel<S, width.value, fits.value, centre>, blocks, layout.threads, 0,
               target.stream, a);
    });
  if (sums) join_parts(target, parts, groups, a.n, {dweight, dbias}, accumulate);
}

template <bool centre>
void any_norm(const Target& target, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
              double shift, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  if (x.numel() == 0) return;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    norm_forward<S, centre>(target, {in<S>(x), in_or_null<S>(weight), in_or_null<S>(bias), out<S>(y),
                                     mean ? out<C>(mean) : nullptr, out<C>(rstd), static_cast<C>(eps),
                                     static_cast<C>(shift), x.shape().rows(), x.shape().back()});
  });
}

template <bool centre>
void any_norm_backward(const Target& target, const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& dx, const Tensor& dweight,
                       const Tensor& dbias, bool accumulate, bool onto_dx, double shift) {
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
    norm_backward<S, centre>(
        target,
        {in<S>(x), in_or_null<S>(weight), in<S>(dy), in_or_null<C>(mean), in<C>(rstd),
         dx ? out<S>(dx) : nullptr, onto_dx, nullptr, nullptr, rows, width, group, static_cast<C>(shift)},
        sums, dweight, dbias, accumulate);
  });
}

}  // namespace

void CudaKernels::layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                             const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_norm("layer_norm", x, weight, bias, rstd);
  require_alike("layer_norm", y, {&x});
  require_vector("layer_norm", "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  any_norm<true>(target_, x, weight, bias, eps, 0, y, mean, rstd);
}

void CudaKernels::layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                                      const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                                      const Tensor& dweight, const Tensor& dbias, bool accumulate,
                                      bool onto_dx) {
  constexpr const char* name = "layer_norm_backward";
  check_norm_backward(name, x, weight, rstd, dy, dx, dweight, dbias);
  require_vector(name, "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  any_norm_backward<true>(target_, x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate, onto_dx, 0);
}

void CudaKernels::rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                           const Tensor& rstd, double shift) {
  check_norm("rms_norm", x, weight, {}, rstd);
  require_alike("rms_norm", y, {&x});
  any_norm<false>(target_, x, weight, {}, eps, shift, y, {}, rstd);
}

void CudaKernels::rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                                    const Tensor& dy, const Tensor& dx, const Tensor& dweight,
                                    bool accumulate, bool onto_dx, double shift) {
  check_norm_backward("rms_norm_backward", x, weight, rstd, dy, dx, dweight, {});
  any_norm_backward<false>(target_, x, weight, {}, rstd, dy, dx, dweight, {}, accumulate, onto_dx, shift);
}

}  // namespace sherd::tensor::SHERD_CUDA
