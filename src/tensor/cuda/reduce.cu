#include <vector>

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

// ---- sums over rows ----

constexpr unsigned row_lanes = 8, column_lanes = 32;

/// parts[blockIdx.y, column] = sum over the block's rows; thread (x, y) takes `width` columns and every
/// eighth row.
template <int width, class S>
__global__ void part_sums_kernel(const S* x, Count rows, Count columns, Count per_part, Compute<S>* parts) {
  using C = Compute<S>;
  SHERD_SHARED(C, sums, row_lanes * column_lanes * width);
  const Count column = (static_cast<Count>(blockIdx.x) * column_lanes + threadIdx.x) * width;
  const Count begin = blockIdx.y * per_part, end = begin + per_part < rows ? begin + per_part : rows;
  C sum[width] = {};
  if (column < columns)
    for (Count row = begin + threadIdx.y; row < end; row += row_lanes) {
      const Pack<S, width> pack = load_pack<width>(x + row * columns + column);
      for (int k = 0; k < width; ++k) sum[k] = sum[k] + widen(pack.at[k]);
    }
  C* mine = sums + (threadIdx.y * column_lanes + threadIdx.x) * width;
  for (int k = 0; k < width; ++k) mine[k] = sum[k];
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int k = 0; k < width; ++k) {
    C total = mine[k];
    for (unsigned y = 1; y < row_lanes; ++y) total = total + mine[y * column_lanes * width + k];
    parts[blockIdx.y * columns + column + k] = total;
  }
}

template <class Out>
__global__ void join_parts_kernel(const Compute<Out>* parts, Count columns, unsigned count, Out* out,
                                  bool accumulate) {
  for (Count i = grid_thread(); i < columns; i += grid_threads()) {
    Compute<Out> sum = parts[i];
    for (unsigned part = 1; part < count; ++part) sum = sum + parts[part * columns + i];
    if (accumulate) sum = widen(out[i]) + sum;
    out[i] = narrow<Out>(sum);
  }
}

// ---- sums over ranks ----

constexpr int most_sources = 64;
template <class S>
struct RankSources {
  const S* at[most_sources];
  int count;
};

/// What becomes of a sum: scaled, rounded, added to what is there; or kept as it is for the next sources.
template <class C>
struct Finish {
  const C* before;  ///< sums of the sources before these; null for none
  C* after;         ///< where unfinished sums go; null: these are the last
  C factor;
  DType rounding;
  bool accumulate;
};

template <class C>
__device__ inline C round_to(DType dtype, C value) {
  if (dtype == DType::bf16) return static_cast<C>(widen(narrow<bf16>(static_cast<float>(value))));
  if (dtype == DType::f16) return static_cast<C>(widen(narrow<f16>(static_cast<float>(value))));
  if (dtype == DType::f32) return static_cast<C>(static_cast<float>(value));
  return value;
}

template <int width, class S, class Out>
__global__ void sum_ranks_kernel(RankSources<S> sources, Finish<Compute<S>> finish, Count n, Out* to) {
  using C = Compute<S>;
  for (Count at = grid_thread() * width; at < n; at += grid_threads() * width) {
    Pack<C, width> sum;
    if (finish.before) {
      sum = load_pack<width>(finish.before + at);
    } else {
      const Pack<S, width> first = load_pack<width>(sources.at[0] + at);
      for (int k = 0; k < width; ++k) sum.at[k] = widen(first.at[k]);
    }
    for (int source = finish.before ? 0 : 1; source < sources.count; ++source) {
      const Pack<S, width> next = load_pack<width>(sources.at[source] + at);
      for (int k = 0; k < width; ++k) sum.at[k] = sum.at[k] + widen(next.at[k]);
    }
    if (finish.after) {
      store_pack(finish.after + at, sum);
      continue;
    }
    Pack<Out, width> result;
    Pack<Out, width> old{};
    if (finish.accumulate) old = load_pack<width>(to + at);
    for (int k = 0; k < width; ++k) {
      // Unscaled sums keep their bits, subnormal ones too, as on the CPU.
      const C scaled = finish.factor == C{1} ? sum.at[k] : sum.at[k] * finish.factor;
      const C value = round_to(finish.rounding, scaled);
      result.at[k] = narrow<Out>(finish.accumulate ? widen(old.at[k]) + value : value);
    }
    store_pack(to + at, result);
  }
}

/// Elements of one access: 16 bytes of the widest of the two, and of the sums kept between launches.
template <class S, class Out>
constexpr int rank_width = 16 / static_cast<int>(sizeof(S) > sizeof(Out) ? sizeof(S) : sizeof(Out));

template <class S, class Out>
void sum_range(const Target& target, const RankSources<S>& sources, Finish<Compute<S>> finish, Count n,
               Out* to) {
  constexpr int width = rank_width<S, Out>;
  bool aligned = aligned_for_packs(to);
  for (int i = 0; i < sources.count; ++i) aligned = aligned && aligned_for_packs(sources.at[i]);
  const Count packed = aligned ? n / width * width : 0;
  const auto queue = [&](auto kernel, int elements, Count begin, Count end) {
    if (begin == end) return;
    RankSources<S> moved = sources;
    for (int i = 0; i < moved.count; ++i) moved.at[i] += begin;
    Finish<Compute<S>> there = finish;
    if (there.before) there.before += begin;
    if (there.after) there.after += begin;
    launch(kernel, blocks_for(end - begin, Count{element_threads} * elements, target.processors, 32),
           element_threads, 0, target.stream, moved, there, end - begin, to + begin);
  };
  queue(sum_ranks_kernel<width, S, Out>, width, 0, packed);
  queue(sum_ranks_kernel<1, S, Out>, 1, packed, n);
}

/// As many sources at a time as a launch takes; what is unfinished waits in the tensor of that name.
template <class S, class Out>
void sum_by_parts(const Target& target, const std::vector<Tensor>& all, Finish<Compute<S>> finish,
                  const Tensor& unfinished, const Tensor& to) {
  Compute<S>* const sums = unfinished ? out<Compute<S>>(unfinished) : nullptr;
  for (std::size_t begin = 0; begin < all.size(); begin += most_sources) {
    RankSources<S> some{};
    for (std::size_t i = begin; i < all.size() && some.count < most_sources; ++i)
      some.at[some.count++] = in<S>(all[i]);
    finish.before = begin > 0 ? sums : nullptr;
    finish.after = begin + most_sources < all.size() ? sums : nullptr;
    sum_range(target, some, finish, to.numel(), out<Out>(to));
  }
}

// ---- exact sums of squares ----

using Word = unsigned long long;

/// Adds `part`, 32 bits that begin at bit `shift` of the sum, to its digits.
__device__ inline void add_digits(Word* digits, std::uint64_t value, int shift) {
  const int word = shift / 32, offset = shift % 32;
  const std::uint64_t low = value << offset, high = offset ? value >> (64 - offset) : 0;
  if (low & 0xffffffffu) atomicAdd(digits + word, Word{low & 0xffffffffu});
  if (low >> 32) atomicAdd(digits + word + 1, Word{low >> 32});
  if (high) atomicAdd(digits + word + 2, Word{high});
}

/// ExactSum::add() on the device; digits[words] counts what is not finite.
__device__ inline void add_term(Word* digits, double term) {
  const auto bits = bits_as<std::uint64_t>(term);
  const auto exponent = static_cast<int>(bits >> 52);
  if (exponent >= 0x7ff) {  // negative, infinite or no number
    if (bits != std::uint64_t{1} << 63) atomicAdd(digits + ExactSum::words, Word{1});
    return;
  }
  if (exponent == 0) return;
  std::uint64_t value = (bits & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1} << 52;
  int shift = exponent - 1075 - ExactSum::lowest_bit;
  if (shift <= -64) return;
  if (shift < 0) value >>= -shift, shift = 0;
  if (shift / 32 + 2 >= ExactSum::words) {
    atomicAdd(digits + ExactSum::words, Word{1});
    return;
  }
  add_digits(digits, value, shift);
}

/// Terms of like size met by one thread, in 128 bits of its registers: 53 of a mantissa, 63 that it is moved
/// up by at most, and 11 for as many terms as are taken before it is emptied into the block's digits.
struct NearTerms {
  static constexpr int window = 64, most = 2048;
  std::uint64_t high = 0, low = 0;
  int base = 0, count = 0;

  __device__ void add(Word* digits, double term) {
    const auto bits = bits_as<std::uint64_t>(term);
    const auto exponent = static_cast<int>(bits >> 52);
    constexpr int lowest = 1075 + ExactSum::lowest_bit, highest = 1300;
    if (count == 0) {
      base = exponent - window / 2;
      base = base < lowest ? lowest : base > highest ? highest : base;
    }
    const int above = exponent - base;
    if (above < 0 || above >= window) return add_term(digits, term);
    const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1} << 52;
    const std::uint64_t moved = mantissa << above;
    low += moved;
    high += (above ? mantissa >> (64 - above) : 0) + (low < moved ? 1 : 0);
    if (++count == most) empty(digits);
  }
  __device__ void empty(Word* digits) {
    const int shift = base - 1075 - ExactSum::lowest_bit;
    if (count) add_digits(digits, low, shift), add_digits(digits, high, shift + 64);
    high = low = 0, count = 0;
  }
};

constexpr unsigned square_threads = 256, lanes_per_block = 8;

/// Blocks of 64 elements, each by eight threads: thread j of them adds up the squares of elements j, j + 8, …
/// in that order, then pairs of threads meet. Those are the CPU's sums to the bit.
template <class S>
__global__ void sum_of_squares_kernel(const S* x, Count n, Word* total) {
  SHERD_SHARED(Word, digits, ExactSum::words + 1);
  if (threadIdx.x <= ExactSum::words) digits[threadIdx.x] = 0;
  __syncthreads();
  const Count blocks = (n + 63) / 64;
  const unsigned j = threadIdx.x % lanes_per_block;
  NearTerms near;
  // Whole warps go round together, as all their lanes meet in the shuffles.
  for (Count warp = grid_thread() / 32 * 4; warp < blocks; warp += grid_threads() / 8) {
    const Count first = (warp + threadIdx.x % 32 / lanes_per_block) * 64 + j;
    double sum = 0;
    for (int k = 0; k < 8; ++k) {
      const Count i = first + k * 8;
      const auto value = i < n ? static_cast<double>(widen(x[i])) : 0.0;
      sum = sum + value * value;
    }
    for (int distance = 4; distance >= 1; distance /= 2)
      sum = sum + __shfl_down_sync(device::SHERD_CUDA::all_lanes, sum, distance, 8);
    if (j == 0) near.add(digits, sum);
  }
  near.empty(digits);
  __syncthreads();
  if (threadIdx.x <= ExactSum::words && digits[threadIdx.x])
    atomicAdd(total + threadIdx.x, digits[threadIdx.x]);
}

// ---- finiteness ----

template <class S>
__device__ inline bool not_finite(S x) {
  if constexpr (std::is_same_v<S, bf16>)
    return (x.bits & 0x7f80u) == 0x7f80u;
  else if constexpr (std::is_same_v<S, f16>)
    return (x.bits & 0x7c00u) == 0x7c00u;
  else if constexpr (std::is_same_v<S, float>)
    return (bits_as<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u;
  else
    return (bits_as<std::uint64_t>(x) >> 52 & 0x7ffu) == 0x7ffu;
}

template <class S>
__global__ void find_not_finite_kernel(const S* x, Count n, unsigned* found) {
  constexpr int width = pack_width<S>;
  const Count packs = reinterpret_cast<std::uintptr_t>(x) % 16 == 0 ? n / width : 0;
  bool bad = false;
  for (Count i = grid_thread(); i < packs; i += grid_threads()) {
    const Pack<S, width> pack = load_pack<width>(x + i * width);
    for (int k = 0; k < width; ++k) bad |= not_finite(pack.at[k]);
  }
  for (Count i = packs * width + grid_thread(); i < n; i += grid_threads()) bad |= not_finite(x[i]);
  if (bad) atomicOr(found, 1u);
}

}  // namespace

void CudaKernels::sum_rows(const Tensor& x, const Tensor& out, bool accumulate) {
  require_row_sums(x, out);
  const Count columns = out.numel(), rows = x.shape().rows();
  if (columns == 0) return;
  if (rows == 0) {
    if (!accumulate) fill(out, 0);
    return;
  }
  const Count per_part = rows_per_part(rows), parts = (rows + per_part - 1) / per_part;
  const Tensor sums = scratch(parts * columns, compute_type(x.dtype()));
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int width = pack_width<S>;
    const bool packs = columns % width == 0 && aligned_for_packs(x.raw());
    const Count per_block = Count{column_lanes} * (packs ? width : 1);
    const dim3 grid(static_cast<unsigned>((columns + per_block - 1) / per_block),
                    static_cast<unsigned>(parts));
    launch(packs ? part_sums_kernel<width, S> : part_sums_kernel<1, S>, grid, dim3(column_lanes, row_lanes),
           0, target_.stream, in<S>(x), rows, columns, per_part, SHERD_CUDA::out<Compute<S>>(sums));
  });
  with_floating(out.dtype(), [&](auto type) {
    using Out = decltype(type);
    launch(join_parts_kernel<Out>, blocks_for(columns, element_threads, target_.processors), element_threads,
           0, target_.stream, in<Compute<Out>>(sums), columns, static_cast<unsigned>(parts),
           SHERD_CUDA::out<Out>(out), accumulate);
  });
}

void CudaKernels::sum_ranks(std::span<const Tensor> sources, double factor, DType rounding, const Tensor& out,
                            bool accumulate) {
  require_floating("sum_ranks", "out", out);
  require(!sources.empty(), "sum_ranks: there are no sources");
  require(is_floating(rounding), "sum_ranks: cannot round to ", name_of(rounding));
  bool mixed = false;
  for (const Tensor& source : sources) {
    require_gradient("sum_ranks", "a source", source, out.numel(), out.dtype());
    mixed = mixed || source.dtype() != sources[0].dtype();
  }
  if (out.numel() == 0) return;
  std::vector<Tensor> all(sources.begin(), sources.end());
  if (mixed)  // fp32 holds what the narrower ones do
    for (Tensor& source : all)
      if (source.dtype() != DType::f32) {
        const Tensor wide = scratch(source.numel(), DType::f32);
        copy(source, wide);
        source = wide;
      }
  const Tensor unfinished =
      all.size() > most_sources ? scratch(out.numel(), compute_type(out.dtype())) : Tensor();
  with_floating(all[0].dtype(), [&](auto source_type) {
    with_floating(out.dtype(), [&](auto out_type) {
      using S = decltype(source_type);
      using Out = decltype(out_type);
      if constexpr (std::is_same_v<Compute<S>, Compute<Out>>) {
        const Finish<Compute<S>> finish{nullptr, nullptr, static_cast<Compute<S>>(factor), rounding,
                                        accumulate};
        sum_by_parts<S, Out>(target_, all, finish, unfinished, out);
      }
    });
  });
}

void CudaKernels::sum_of_squares(std::span<const Tensor> all, ExactSum& sum) {
  Count elements = 0;
  for (const Tensor& x : all) {
    require_floating("sum_of_squares", "x", x);
    elements += x.numel();
  }
  if (elements == 0) return;
  constexpr int words = ExactSum::words + 1;
  const Tensor total = scratch(words, DType::i64), read = scratch(words, DType::i64, device::Tier::host);
  target_.device.zero(total.raw(), total.bytes());
  for (const Tensor& x : all) {
    if (x.numel() == 0) continue;
    with_floating(x.dtype(), [&](auto type) {
      using S = decltype(type);
      launch(sum_of_squares_kernel<S>,
             blocks_for(x.numel(), Count{square_threads} * 8, target_.processors, 8), square_threads, 0,
             target_.stream, in<S>(x), x.numel(), out<Word>(total));
    });
  }
  target_.device.copy(read.raw(), total.raw(), total.bytes());
  target_.device.synchronize();
  sum.add(ExactSum::from_words({in<std::int64_t>(read), static_cast<std::size_t>(words)}));
}

bool CudaKernels::all_finite(const Tensor& x) {
  require_floating("all_finite", "x", x);
  if (x.numel() == 0) return true;
  const Tensor found = scratch(1, DType::i32, device::Tier::host);
  auto* word = out<unsigned>(found);
  *word = 0;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(find_not_finite_kernel<S>,
           blocks_for(x.numel(), Count{element_threads} * pack_width<S>, target_.processors), element_threads,
           0, target_.stream, in<S>(x), x.numel(), word);
  });
  target_.device.synchronize();
  return *word == 0;
}

}  // namespace sherd::tensor::SHERD_CUDA
