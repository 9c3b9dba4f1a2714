#include "tensor/cuda/fp8.cuh"

// Whole matrices. A block of threads holds its tile in registers between finding the largest magnitudes and
// encoding: where a scale is a tile's own, all of it is one pass.

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The matrix as it lies.
template <class S>
struct Fp8Source {
  const S* x;
  Count rows, cols;
  bool packs;  ///< 16 bytes of a row are aligned to as many
};

/// A thread's elements of a tile. A warp has 16 rows; each of its lanes 16 bytes of a row in every step, so
/// that one row's lanes read next to each other, and four steps are four rows of the same columns.
template <class S>
struct Fp8Part {
  static constexpr int width = pack_width<S>, lanes = fp8_side / width, steps = fp8_warp_rows * lanes / 32;

  Pack<S, width> values[steps];

  __device__ static int first_row() {
    return static_cast<int>(threadIdx.x) / 32 * fp8_warp_rows +
           static_cast<int>(threadIdx.x) % 32 / lanes * steps;
  }
  __device__ static int col() { return static_cast<int>(threadIdx.x) % lanes * width; }

  __device__ void load(const Fp8Source<S>& from, Count tile_row, Count tile_col) {
    const Count row = tile_row + first_row(), column = tile_col + col();
    SHERD_UNROLL
    for (int step = 0; step < steps; ++step)
      values[step] = load_part<width>(from.x + (row + step) * from.cols + column,
                                      row + step < from.rows ? from.cols - column : 0, from.packs);
  }
  /// The largest finite magnitude in all of the row; its lanes take part together.
  __device__ Bits row_largest(int step) const {
    Bits most = largest_of(values[step]);
    SHERD_UNROLL
    for (int distance = lanes / 2; distance >= 1; distance /= 2)
      most = Larger{}(most, __shfl_xor_sync(all_lanes, most, distance));
    return most;
  }
  __device__ Bits tile_largest() const {
    Bits most = 0;
    SHERD_UNROLL
    for (int step = 0; step < steps; ++step) most = Larger{}(most, largest_of(values[step]));
    return block_reduce(most, Larger{}, Bits{0});
  }
  /// The largest finite magnitude of each of the tile's columns, into shared memory.
  __device__ void column_largest(Bits* largest) const {
    if (threadIdx.x < fp8_side) largest[threadIdx.x] = 0;
    __syncthreads();
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) {
      Bits most = 0;
      SHERD_UNROLL
      for (int step = 0; step < steps; ++step)
        most = Larger{}(most, fp8_finite_magnitude<Fp8Numbers>(widen(values[step].at[k])));
      if (most) atomicMax(largest + col() + k, most);
    }
    __syncthreads();
  }
};

/// Where the result goes.
struct Fp8Result {
  std::uint8_t* codes;
  float* scales;
  Count padded_rows, padded_cols, across;  ///< across: tiles beside each other
  Fp8Scaling scaling;
  Count scale_stride;  ///< blocks of 128 x 128: from one row of blocks to the next
  unsigned long long* lost;
};

/// Raises largest[row of the result] to the largest magnitude in each row of a tile.
template <class S, bool transposed>
__global__ void fp8_row_largest_kernel(Fp8Source<S> from, Count across, Bits* largest) {
  using Part = Fp8Part<S>;
  const Count row = blockIdx.x / across * fp8_side, col = blockIdx.x % across * fp8_side;
  Part part;
  part.load(from, row, col);
  if constexpr (transposed) {
    SHERD_SHARED(Bits, columns, fp8_side);
    part.column_largest(columns);
    const Count column = col + threadIdx.x;
    if (threadIdx.x < fp8_side && column < from.cols) atomicMax(largest + column, columns[threadIdx.x]);
  } else {
    SHERD_UNROLL
    for (int step = 0; step < Part::steps; ++step) {
      const Bits most = part.row_largest(step);
      const Count at = row + Part::first_row() + step;
      if (Part::col() == 0 && at < from.rows) atomicMax(largest + at, most);
    }
  }
}

__global__ void fp8_scales_kernel(Fp8Format format, Bits* scales, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) scales[i] = fp8_scale_bits(format, scales[i]);
}

/// The bits of the scale that all of a tile shares, where it does; written where it is the tile's own.
template <Fp8Format format, class S>
__device__ inline Bits fp8_tile_scale(const Fp8Part<S>& part, const Fp8Result& to, Count row, Count col) {
  if (to.scaling == Fp8Scaling::tensor) return bits_as<Bits>(to.scales[0]);
  if (to.scaling != Fp8Scaling::blocks_128x128) return 0;
  const Bits scale = fp8_scale_bits(format, part.tile_largest());
  float* blocks = to.scales + row / fp8_side * to.scale_stride;
  if (threadIdx.x == 0) blocks[col / fp8_side] = bits_as<float>(scale);
  // The last tile of a row fills what the layout asks for behind it.
  const Count behind = to.across + threadIdx.x;
  if (col / fp8_side == to.across - 1 && behind < to.scale_stride)
    blocks[behind] = bits_as<float>(fp8_scale_bits(format, 0));
  return scale;
}

/// Codes of a tile whose rows are the source's.
template <Fp8Format format, class S>
__device__ inline void fp8_encode_rows(const Fp8Part<S>& part, const Fp8Result& to, Count tile_row,
                                       Count tile_col, Fp8Lost& lost) {
  using Part = Fp8Part<S>;
  Bits scale = fp8_tile_scale<format>(part, to, tile_row, tile_col);
  const Count col = tile_col + Part::col();
  SHERD_UNROLL
  for (int step = 0; step < Part::steps; ++step) {
    const Count row = tile_row + Part::first_row() + step;
    if (to.scaling == Fp8Scaling::rows) {
      scale = row < to.padded_rows ? bits_as<Bits>(to.scales[row]) : fp8_scale_bits(format, 0);
    } else if (to.scaling == Fp8Scaling::blocks_1x128) {
      scale = fp8_scale_bits(format, part.row_largest(step));
      if (Part::col() == 0 && row < to.padded_rows)
        to.scales[tile_col / fp8_side * to.padded_rows + row] = bits_as<float>(scale);
    }
    const float inverse = fp8_inverse(scale);
    const auto codes = fp8_codes<format>(part.values[step], inverse, lost);
    if (row < to.padded_rows && col < to.padded_cols)
      store_pack(to.codes + row * to.padded_cols + col, codes);
  }
}

/// Where word `word` of row `row` of a tile of codes lies, turned so that neither writers of columns nor
/// readers of rows meet in a bank.
__device__ inline int fp8_turned(int row, int word) {
  constexpr int words = fp8_side / 4;
  return row * words + (word + row / 4 + row % 4 * 8) % words;
}

/// Codes of a tile whose rows are the source's columns, which shared memory turns.
template <Fp8Format format, class S>
__device__ inline void fp8_encode_columns(const Fp8Part<S>& part, const Fp8Result& to, Count tile_row,
                                          Count tile_col, Fp8Lost& lost) {
  using Part = Fp8Part<S>;
  SHERD_SHARED(Bits, words, fp8_side * fp8_side / 4);
  SHERD_SHARED(Bits, largest, fp8_side);
  const Bits shared_scale = fp8_tile_scale<format>(part, to, tile_row, tile_col);
  const Count row = tile_row + Part::col();
  if (to.scaling == Fp8Scaling::blocks_1x128) {
    part.column_largest(largest);
    if (threadIdx.x < fp8_side && tile_row + threadIdx.x < to.padded_rows)
      to.scales[tile_col / fp8_side * to.padded_rows + tile_row + threadIdx.x] =
          bits_as<float>(fp8_scale_bits(format, largest[threadIdx.x]));
  }
  float inverse[Part::width];
  SHERD_UNROLL
  for (int k = 0; k < Part::width; ++k) {
    Bits scale = shared_scale;
    if (to.scaling == Fp8Scaling::blocks_1x128)
      scale = fp8_scale_bits(format, largest[Part::col() + k]);
    else if (to.scaling == Fp8Scaling::rows)
      scale = row + k < to.padded_rows ? bits_as<Bits>(to.scales[row + k]) : fp8_scale_bits(format, 0);
    inverse[k] = fp8_inverse(scale);
  }
  SHERD_UNROLL
  for (int step = 0; step < Part::steps; step += 4) SHERD_UNROLL
  for (int k = 0; k < Part::width; ++k) {
    Bits four = 0;
    SHERD_UNROLL
    for (int i = 0; i < 4; i += 2)
      four |= fp8_pair<format>(widen(part.values[step + i].at[k]), widen(part.values[step + i + 1].at[k]),
                               inverse[k], lost)
              << (8 * i);
    words[fp8_turned(Part::col() + k, (Part::first_row() + step) / 4)] = four;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Count col = tile_col + lane * 4;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < fp8_side; r += int{fp8_warps})
    if (tile_row + r < to.padded_rows && col < to.padded_cols)
      *reinterpret_cast<Bits*>(to.codes + (tile_row + r) * to.padded_cols + col) = words[fp8_turned(r, lane)];
}

template <class S, Fp8Format format, bool transposed>
__global__ void fp8_tile_kernel(Fp8Source<S> from, Fp8Result to) {
  const Count row = blockIdx.x / to.across * fp8_side, col = blockIdx.x % to.across * fp8_side;
  Fp8Part<S> part;
  part.load(from, transposed ? col : row, transposed ? row : col);
  Fp8Lost lost;
  if constexpr (transposed)
    fp8_encode_columns<format>(part, to, row, col, lost);
  else
    fp8_encode_rows<format>(part, to, row, col, lost);
  if (!to.lost) return;
  const unsigned all = block_sum(lost.both);
  constexpr unsigned low = (1u << Fp8Lost::shift) - 1;
  if (threadIdx.x != 0) return;
  if (all & low) atomicAdd(to.lost, static_cast<unsigned long long>(all & low));
  if (all >> Fp8Lost::shift) atomicAdd(to.lost + 1, static_cast<unsigned long long>(all >> Fp8Lost::shift));
}

void scales_from(const Target& target, Fp8Format format, const Tensor& scales) {
  launch(fp8_scales_kernel, blocks_for(scales.numel(), element_threads, target.processors), element_threads,
         0, target.stream, format, out<Bits>(scales), scales.numel());
}

template <class S>
Fp8Source<S> source_of(const Tensor& x, bool transposed, const Fp8Matrix& to) {
  const Count rows = transposed ? to.cols : to.rows, cols = transposed ? to.rows : to.cols;
  return {in<S>(x), rows, cols, aligned_for_packs(x.raw()) && cols % pack_width<S> == 0};
}

/// The scales of `to` where they are known only when all of x has been seen.
void find_scales(const Target& target, const Tensor& x, bool transposed, const Fp8Matrix& to) {
  target.device.zero(to.scales.raw(), to.scales.bytes());
  if (x.numel() > 0 && to.rule.scaling == Fp8Scaling::tensor) {
    raise_to_largest(target, x, to.scales);
  } else if (x.numel() > 0) {
    with_fp8_source(x.dtype(), [&](auto type) {
      using S = decltype(type);
      const auto from = source_of<S>(x, transposed, to);
      launch(transposed ? fp8_row_largest_kernel<S, true> : fp8_row_largest_kernel<S, false>,
             static_cast<unsigned>(fp8_blocks(to.rows) * fp8_blocks(to.cols)), fp8_threads, 0, target.stream,
             from, fp8_blocks(from.cols), out<Bits>(to.scales));
    });
  }
  scales_from(target, to.rule.format, to.scales);
}

}  // namespace

void CudaKernels::to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) {
  check_to_fp8(x, transposed, to, lost);
  require(aligned_for_packs(to.codes.raw()), "to_fp8: the codes must be aligned to 16 bytes");
  if (to.scales.numel() == 0) return;
  const Fp8Scaling scaling = to.rule.scaling;
  if (scaling == Fp8Scaling::tensor || scaling == Fp8Scaling::rows) find_scales(target_, x, transposed, to);
  if (x.numel() == 0) return;
  const Fp8Result result{out<std::uint8_t>(to.codes),
                         out<float>(to.scales),
                         fp8_padded(to.rows),
                         fp8_padded(to.cols),
                         fp8_blocks(to.cols),
                         scaling,
                         scaling == Fp8Scaling::blocks_128x128 ? to.scales.shape()[1] : 0,
                         lost ? out<unsigned long long>(lost) : nullptr};
  with_fp8_source(x.dtype(), [&](auto type) {
    with_fp8_format(to.rule.format, [&](auto format) {
      using S = decltype(type);
      const auto from = source_of<S>(x, transposed, to);
      launch(transposed ? fp8_tile_kernel<S, decltype(format)::value, true>
                        : fp8_tile_kernel<S, decltype(format)::value, false>,
             static_cast<unsigned>(fp8_blocks(to.rows) * result.across), fp8_threads, 0, target_.stream, from,
             result);
    });
  });
}

void CudaKernels::fp8_scales(Fp8Format format, const Tensor& scales) {
  if (scales.numel() > 0) scales_from(target_, format, scales);
}

}  // namespace sherd::tensor::SHERD_CUDA
