#include <algorithm>

#include "tensor/cuda/join_parts.cuh"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

// ---- sums over rows ----

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

// ---- what one rank gives to a sum ----

template <class C>
__device__ inline C round_to(DType dtype, C value) {
  if (dtype == DType::bf16) return static_cast<C>(widen(narrow<bf16>(static_cast<float>(value))));
  if (dtype == DType::f16) return static_cast<C>(widen(narrow<f16>(static_cast<float>(value))));
  if (dtype == DType::f32) return static_cast<C>(static_cast<float>(value));
  return value;
}

template <int width, class S, class Out>
__global__ void fold_kernel(const S* from, DType rounding, bool accumulate, Count n, Out* to) {
  for (Count at = grid_thread() * width; at < n; at += grid_threads() * width) {
    const Pack<S, width> given = load_pack<width>(from + at);
    Pack<Out, width> old{}, result;
    if (accumulate) old = load_pack<width>(to + at);
    for (int k = 0; k < width; ++k) {
      const Compute<S> value = round_to(rounding, widen(given.at[k]));
      result.at[k] = narrow<Out>(accumulate ? widen(old.at[k]) + value : value);
    }
    store_pack(to + at, result);
  }
}

template <class S, class Out>
void fold_range(const Target& target, const S* from, DType rounding, bool accumulate, Count n, Out* to) {
  constexpr int width = 16 / static_cast<int>(std::max(sizeof(S), sizeof(Out)));  // 16 bytes of the wider one
  const Count packed = aligned_for_packs(to) && aligned_for_packs(from) ? n / width * width : 0;
  const auto queue = [&](auto kernel, int elements, Count begin, Count end) {
    if (begin == end) return;
    launch(kernel, blocks_for(end - begin, Count{element_threads} * elements, target.processors, 32),
           element_threads, 0, target.stream, from + begin, rounding, accumulate, end - begin, to + begin);
  };
  queue(fold_kernel<width, S, Out>, width, 0, packed);
  queue(fold_kernel<1, S, Out>, 1, packed, n);
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
    join_parts(target_, in<Compute<S>>(sums), parts, columns, {out}, accumulate);
  });
}

void CudaKernels::fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) {
  require_floating("fold", "to", to);
  require(is_floating(rounding), "fold: cannot round to ", name_of(rounding));
  require_gradient("fold", "from", from, to.numel(), to.dtype());
  if (to.numel() == 0) return;
  with_floating(from.dtype(), to.dtype(), [&](auto from_type, auto to_type) {
    using S = decltype(from_type);
    using Out = decltype(to_type);
    fold_range<S, Out>(target_, in<S>(from), rounding, accumulate, to.numel(), out<Out>(to));
  });
}

void CudaKernels::sums_of_squares(std::span<const Tensor> all, ExactSum& sum) {
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

}  // namespace sherd::tensor::SHERD_CUDA
