#include <algorithm>

#include "tensor/cuda/cuda_kernels.h"
#include "tensor/cuda/families.cuh"
#include "tensor/cuda/row_sort.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// to[row] = the table's row of ids[row]; zeros for an id that it lacks, and word of one that is outside the
/// vocabulary.
template <int width, class S>
__global__ void embedding_kernel(const std::int32_t* ids, Count rows, TableIds held, Count n, const S* table,
                                 S* to, DataErrorSlot* wrong) {
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int32_t id = ids[row];
    if ((id < 0 || id >= held.vocab) && threadIdx.x == 0) raise(wrong, row, id, held.vocab);
    const Count from = id - held.first;
    const bool known = from >= 0 && from < held.rows;
    for (Count at = Count{threadIdx.x} * width; at < n; at += Count{blockDim.x} * width) {
      Pack<S, width> values{};
      if (known) values = load_pack<width>(table + from * n + at);
      store_pack(to + row * n + at, values);
    }
  }
}

/// Rows whose loads are under way together.
constexpr int ahead = 8;

/// The table's rows += the rows of dy of each, in order, rounded once. `keys` are the table's rows in order,
/// of equal ones the rows of dy in order too. Blocks of x take the places where a run of one id begins,
/// blocks of y parts of its columns.
template <int width, class S, class T>
__global__ void embedding_backward_kernel(SortedRows sorted, Count rows, Count held, Count n, const S* dy,
                                          T* table) {
  using C = Compute<S>;
  const Count at = (Count{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  if (at >= n) return;
  for (Count begin = blockIdx.x; begin < rows; begin += gridDim.x) {
    const std::uint32_t id = sorted.keys[begin];
    if (id >= held || (begin > 0 && sorted.keys[begin - 1] == id)) continue;
    T* to = table + Count{id} * n + at;
    Pack<T, width> old = load_pack<width>(to);
    C sums[width];
    for (int k = 0; k < width; ++k) sums[k] = widen(old.at[k]);
    for (Count i = begin; i < rows && sorted.keys[i] == id; i += ahead) {
      Pack<S, width> values[ahead] = {};
      int count = 0;
      SHERD_UNROLL
      for (int a = 0; a < ahead; ++a)
        if (i + a < rows && sorted.keys[i + a] == id) {
          values[a] = load_pack<width>(dy + Count{sorted.rows[i + a]} * n + at);
          count = a + 1;
        }
      SHERD_UNROLL
      for (int a = 0; a < ahead; ++a)
        if (a < count)
          for (int k = 0; k < width; ++k) sums[k] = sums[k] + widen(values[a].at[k]);
    }
    for (int k = 0; k < width; ++k) old.at[k] = narrow<T>(sums[k]);
    store_pack(to, old);
  }
}

/// to[r·stride + i] = x[r·stride + i] + table[i]. A thread adds one part of the table wherever it belongs.
template <int width, class S, class T>
__global__ void add_rows_kernel(const S* x, const T* table, Count table_size, Count repeats, Count stride,
                                S* to) {
  const Count at = grid_thread() * width;
  if (at >= table_size) return;
  const Pack<T, width> added = load_pack<width>(table + at);
  for (Count repeat = blockIdx.y; repeat < repeats; repeat += gridDim.y) {
    Pack<S, width> values = load_pack<width>(x + repeat * stride + at);
    for (int k = 0; k < width; ++k) values.at[k] = narrow<S>(widen(values.at[k]) + widen(added.at[k]));
    store_pack(to + repeat * stride + at, values);
  }
}

/// to[i] (+)= the sum of dy[repeat·stride + i] over repeats, in order.
template <int width, class S, class T>
__global__ void sum_repeats_kernel(const S* dy, Count size, Count repeats, Count stride, T* to,
                                   bool accumulate) {
  using C = Compute<S>;
  const Count at = grid_thread() * width;
  if (at >= size) return;
  C sums[width] = {};
  for (Count repeat = 0; repeat < repeats; ++repeat) {
    const Pack<S, width> values = load_pack<width>(dy + repeat * stride + at);
    for (int k = 0; k < width; ++k) sums[k] = sums[k] + widen(values.at[k]);
  }
  Pack<T, width> old{};
  if (accumulate) old = load_pack<width>(to + at);
  for (int k = 0; k < width; ++k) old.at[k] = narrow<T>(accumulate ? widen(old.at[k]) + sums[k] : sums[k]);
  store_pack(to + at, old);
}

unsigned ceil_div(Count n, Count by) {
  return static_cast<unsigned>((n + by - 1) / by);
}

/// Columns that a thread takes at once: as many of both types as one access moves, where all is aligned.
template <class S, class T>
constexpr int common_width = pack_width<std::conditional_t<(sizeof(S) > sizeof(T)), S, T>>;

unsigned row_threads(Count packs) {
  return packs >= element_threads ? element_threads : ceil_div(packs, 32) * 32;
}

/// to[first + r·stride + i] = x[first + r·stride + i] + table[i], for every r whose sequence of `stride`
/// elements x has.
void add_repeated(const Target& target, const Tensor& x, Count first, Count stride, const Tensor& table,
                  const Tensor& to) {
  const Count size = table.numel(), repeats = x.numel() / stride;
  if (repeats == 0) return;
  with_floating(x.dtype(), table.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int width = common_width<S, T>;
    const S* from = in<S>(x) + first;
    S* result = out<S>(to) + first;
    const bool packs =
        size % width == 0 && stride % width == 0 && aligned_for_packs(from, in<T>(table), result);
    const unsigned grid = ceil_div(size, packs ? element_threads * width : element_threads);
    // Enough blocks to fill the device, each of which reads its part of the table once.
    const Count wanted = ceil_div(Count{target.processors} * 16, grid);
    const dim3 blocks(grid, static_cast<unsigned>(std::min<Count>({repeats, wanted, 65535})));
    launch(packs ? add_rows_kernel<width, S, T> : add_rows_kernel<1, S, T>, blocks, element_threads, 0,
           target.stream, from, in<T>(table), size, repeats, stride, result);
  });
}

/// The range's rows of dtable (+)= the sum over sequences of its rows of dy.
void sum_batch(const Target& target, const Tensor& dy, const Tensor& dtable, const PositionRange& range,
               bool accumulate) {
  const Count columns = dtable.shape()[1], stride = dy.shape()[-2] * columns, size = range.count * columns;
  if (size == 0) return;
  with_floating(dy.dtype(), dtable.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int width = common_width<S, T>;
    const S* from = in<S>(dy) + range.row * columns;
    T* to = out<T>(dtable) + range.position * columns;
    const bool packs = size % width == 0 && stride % width == 0 && aligned_for_packs(from, to);
    launch(packs ? sum_repeats_kernel<width, S, T> : sum_repeats_kernel<1, S, T>,
           ceil_div(size, packs ? element_threads * width : element_threads), element_threads, 0,
           target.stream, from, size, dy.numel() / stride, stride, to, accumulate);
  });
}

}  // namespace

void add_row(const Target& target, const Tensor& x, const Tensor& table, const Tensor& to) {
  if (table.numel() > 0) add_repeated(target, x, 0, table.numel(), table, to);
}

void CudaKernels::embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                            const VocabSlice& slice) {
  const Count width = check_embedding("embedding", ids, table, out), rows = ids.numel();
  const TableIds held{slice.first, table.shape()[0], check_vocab_slice("embedding", table.shape()[0], slice)};
  require(out.dtype() == table.dtype(), "embedding: the output must be ", name_of(table.dtype()), ", not ",
          name_of(out.dtype()));
  if (out.numel() == 0) return;
  const auto look_up = [&](auto type) {
    using S = decltype(type);
    constexpr int pack = pack_width<S>;
    const bool packs = width % pack == 0 && aligned_for_packs(table.raw(), out.raw());
    launch(packs ? embedding_kernel<pack, S> : embedding_kernel<1, S>,
           blocks_for(rows, 1, target_.processors, 32), row_threads(packs ? width / pack : width), 0,
           target_.stream, in<std::int32_t>(ids), rows, held, width, in<S>(table), SHERD_CUDA::out<S>(out),
           errors_.slot(DataError::embedding_id));
  };
  if (table.dtype() == DType::i32)
    look_up(std::int32_t{});
  else
    with_floating(table.dtype(), look_up);
}

void CudaKernels::embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable,
                                     bool accumulate, const VocabSlice& slice, std::optional<DType> fold) {
  constexpr const char* name = "embedding_backward";
  require(!fold, "embedding_backward: a GPU folds no gradients");
  const Count width = check_embedding(name, ids, dtable, dy), rows = ids.numel();
  const TableIds held{slice.first, dtable.shape()[0], check_vocab_slice(name, dtable.shape()[0], slice)};
  check_summable(name, dy, dtable);
  if (!accumulate) fill(dtable, 0);
  if (dy.numel() == 0) return;
  const RowSort sort(target_, ids, held, errors_.slot(DataError::embedding_id));
  with_floating(dy.dtype(), dtable.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int pack = common_width<S, T>;
    const bool packs = width % pack == 0 && aligned_for_packs(dy.raw(), dtable.raw());
    const unsigned threads = row_threads(packs ? width / pack : width);
    const dim3 blocks(blocks_for(rows, 1, target_.processors, 64),
                      ceil_div(width, threads * (packs ? pack : 1)));
    launch(packs ? embedding_backward_kernel<pack, S, T> : embedding_backward_kernel<1, S, T>, blocks,
           threads, 0, target_.stream, sort.sorted(), rows, held.rows, width, in<S>(dy), out<T>(dtable));
  });
}

void CudaKernels::add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                                const Positions& positions) {
  require_alike("add_positions", out, {&x});
  const std::vector<PositionRange> ranges = check_positions("add_positions", x, table, positions);
  require(table.dtype() == x.dtype(), "add_positions: dtypes differ: ", name_of(table.dtype()), " and ",
          name_of(x.dtype()));
  if (x.numel() == 0) return;
  const Count width = table.shape()[1];
  for (const auto& [row, position, count] : ranges)
    add_repeated(target_, x, row * width, x.shape()[-2] * width, table.rows(position, position + count), out);
}

void CudaKernels::add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                                         const Positions& positions) {
  sum_positions(*this, dy, dtable, accumulate, positions,
                [&](const PositionRange& range) { sum_batch(target_, dy, dtable, range, accumulate); });
}

}  // namespace sherd::tensor::SHERD_CUDA
