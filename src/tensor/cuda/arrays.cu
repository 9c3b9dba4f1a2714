#include "tensor/cuda/families.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr unsigned tile = 32, tile_rows = 8;

/// to[i] = the element of the array that lies in `from` at the loops' strides.
template <class Bits>
__global__ void gather_kernel(const Bits* from, ArrayLoops loops, Count n, Bits* to) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    Count rest = i, at = 0;
    for (int axis = loops.rank - 1; axis >= 0; --axis) {
      const Count extent = loops.extents[axis];
      at += rest % extent * loops.strides[0][axis];
      rest /= extent;
    }
    to[i] = from[at];
  }
}

/// Matrices [rows, columns] of `to`, one after the other, whose columns are dense in `from`, their rows
/// `step` apart there: squares through shared memory, so that both sides are read and written along their
/// lines.
template <class Bits>
__global__ void transpose_kernel(const Bits* from, Count matrices, Count matrix_step, Count rows,
                                 Count columns, Count step, Bits* to) {
  SHERD_SHARED(Bits, square, tile * (tile + 1));
  const Count across = (columns + tile - 1) / tile, squares = (rows + tile - 1) / tile * across;
  for (Count at = blockIdx.x; at < matrices * squares; at += gridDim.x) {
    const Bits* x = from + at / squares * matrix_step;
    Bits* y = to + at / squares * rows * columns;
    const Count row = at % squares / across * tile, column = at % squares % across * tile;
    __syncthreads();  // until the square before was written out
    for (unsigned k = threadIdx.y; k < tile; k += tile_rows)
      if (row + threadIdx.x < rows && column + k < columns)
        square[k * (tile + 1) + threadIdx.x] = x[row + threadIdx.x + (column + k) * step];
    __syncthreads();
    for (unsigned k = threadIdx.y; k < tile; k += tile_rows)
      if (row + k < rows && column + threadIdx.x < columns)
        y[(row + k) * columns + column + threadIdx.x] = square[threadIdx.x * (tile + 1) + k];
  }
}

template <class Bits>
void gather(const Target& target, const Tensor& from, const ArrayLoops& loops, const Tensor& to) {
  const int last = loops.rank - 1;
  const bool transposes =
      (loops.rank == 2 || loops.rank == 3) && loops.strides[0][last] > 1 && loops.strides[0][last - 1] == 1;
  if (!transposes) {
    launch(gather_kernel<Bits>, blocks_for(to.numel(), element_threads, target.processors, 32),
           element_threads, 0, target.stream, in<Bits>(from), loops, to.numel(), out<Bits>(to));
    return;
  }
  const Count matrices = loops.rank == 3 ? loops.extents[0] : 1;
  const Count matrix_step = loops.rank == 3 ? loops.strides[0][0] : 0;
  const Count rows = loops.extents[last - 1], columns = loops.extents[last];
  const Count squares = matrices * ((rows + tile - 1) / tile) * ((columns + tile - 1) / tile);
  launch(transpose_kernel<Bits>, blocks_for(squares, 1, target.processors, 32), dim3(tile, tile_rows), 0,
         target.stream, in<Bits>(from), matrices, matrix_step, rows, columns, loops.strides[0][last],
         out<Bits>(to));
}

}  // namespace

void CudaKernels::copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) {
  const ArrayLoops loops = check_copy_strided(from, strides, to);
  if (to.numel() == 0) return;
  with_bits(to.dtype(), [&](auto zero) { gather<decltype(zero)>(target_, from, loops, to); });
}

}  // namespace sherd::tensor::SHERD_CUDA
