#include <algorithm>

#include "tensor/cuda/cuda_kernels.h"
#include "tensor/cuda/families.cuh"
#include "tensor/cuda/row_sort.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// to[row] = table[ids[row]]; zeros, and word of it, for an id that the table lacks.
template <int width, class S>
__global__ void embedding_kernel(const std::int32_t* ids, Count rows, Count vocab, Count n, const S* table,
                                 S* to, DataErrorSlot* wrong) {
  for (Count row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int32_t id = ids[row];
    const bool known = id >= 0 && id < vocab;
    if (!known && threadIdx.x == 0) raise(wrong, row, id, vocab);
    for (Count at = Count{threadIdx.x} * width; at < n; at += Count{blockDim.x} * width) {
      Pack<S, width> values{};
      if (known) values = load_pack<width>(table + id * n + at);
      store_pack(to + row * n + at, values);
    }
  }
}

/// Rows whose loads are under way together.
constexpr int ahead = 8;

/// table[id] += the rows of dy of each id, in order, rounded once. `keys` are ids in order, of equal ones the
/// rows in order too. Blocks of x take the places where a run of one id begins, blocks of y parts of its
/// columns.
template <int width, class S, class T>
__global__ void embedding_backward_kernel(SortedRows sorted, Count rows, Count vocab, Count n, const S* dy,
                                          T* table) {
  using C = Compute<S>;
  const Count at = (Count{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  if (at >= n) return;
  for (Count begin = blockIdx.x; begin < rows; begin += gridDim.x) {
    const std::uint32_t id = sorted.keys[begin];
    if (id >= vocab || (begin > 0 && sorted.keys[begin - 1] == id)) continue;
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

/// to[r, i] = x[r, i] + table[r mod positions, i]. A thread adds one part of a table's row wherever it
/// belongs.
template <int width, class S, class T>
__global__ void add_rows_kernel(const S* x, const T* table, Count table_size, Count repeats, S* to) {
  const Count at = grid_thread() * width;
  if (at >= table_size) return;
  const Pack<T, width> added = load_pack<width>(table + at);
  for (Count repeat = blockIdx.y; repeat < repeats; repeat += gridDim.y) {
    Pack<S, width> values = load_pack<width>(x + repeat * table_size + at);
    for (int k = 0; k < width; ++k) values.at[k] = narrow<S>(widen(values.at[k]) + widen(added.at[k]));
    store_pack(to + repeat * table_size + at, values);
  }
}

/// to[i] (+)= the sum of dy[repeat, i] over repeats, in order.
template <int width, class S, class T>
__global__ void sum_repeats_kernel(const S* dy, Count size, Count repeats, T* to, bool accumulate) {
  using C = Compute<S>;
  const Count at = grid_thread() * width;
  if (at >= size) return;
  C sums[width] = {};
  for (Count repeat = 0; repeat < repeats; ++repeat) {
    const Pack<S, width> values = load_pack<width>(dy + repeat * size + at);
    for (int k = 0; k < width; ++k) sums[k] = sums[k] + widen(values.at[k]);
  }
  Pack<T, width> old{};
  if (accumulate) old = load_pack<width>(to + at);
  for (int k = 0; k < width; ++k) old.at[k] = narrow<T>(accumulate ? widen(old.at[k]) + sums[k] : sums[k]);
  store_pack(to + at, old);
}

/// f with a value of each tensor's type; both have one compute type, which was checked.
template <class Fn>
void with_two(DType first, DType second, const Fn& f) {
  if (first == DType::f64) return f(double{}, double{});
  const auto narrow_types = [](DType dtype, const auto& g) {
    if (dtype == DType::bf16) return g(bf16{});
    if (dtype == DType::f16) return g(f16{});
    return g(float{});
  };
  narrow_types(first, [&](auto a) { narrow_types(second, [&](auto b) { f(a, b); }); });
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

}  // namespace

void add_row(const Target& target, const Tensor& x, const Tensor& table, const Tensor& to) {
  const Count size = table.numel(), repeats = size == 0 ? 0 : x.numel() / size;
  if (repeats == 0) return;
  with_two(x.dtype(), table.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int width = common_width<S, T>;
    const bool packs = size % width == 0 && aligned_for_packs(x.raw(), table.raw(), to.raw());
    const unsigned grid = ceil_div(size, packs ? element_threads * width : element_threads);
    // Enough blocks to fill the device, each of which reads its part of the table once.
    const Count wanted = ceil_div(Count{target.processors} * 16, grid);
    const dim3 blocks(grid, static_cast<unsigned>(std::min<Count>({repeats, wanted, 65535})));
    launch(packs ? add_rows_kernel<width, S, T> : add_rows_kernel<1, S, T>, blocks, element_threads, 0,
           target.stream, in<S>(x), in<T>(table), size, repeats, out<S>(to));
  });
}

void CudaKernels::embedding(const Tensor& ids, const Tensor& table, const Tensor& out, const VocabSlice&) {
  const Count width = check_embedding("embedding", ids, table, out), rows = ids.numel();
  require(out.dtype() == table.dtype(), "embedding: the output must be ", name_of(table.dtype()), ", not ",
          name_of(out.dtype()));
  if (out.numel() == 0) return;
  with_floating(table.dtype(), [&](auto type) {
    using S = decltype(type);
    constexpr int pack = pack_width<S>;
    const bool packs = width % pack == 0 && aligned_for_packs(table.raw(), out.raw());
    launch(packs ? embedding_kernel<pack, S> : embedding_kernel<1, S>,
           blocks_for(rows, 1, target_.processors, 32), row_threads(packs ? width / pack : width), 0,
           target_.stream, in<std::int32_t>(ids), rows, table.shape()[0], width, in<S>(table),
           SHERD_CUDA::out<S>(out), errors_.slot(DataError::embedding_id));
  });
}

void CudaKernels::embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable,
                                     bool accumulate, const VocabSlice&) {
  constexpr const char* name = "embedding_backward";
  const Count width = check_embedding(name, ids, dtable, dy), rows = ids.numel(), vocab = dtable.shape()[0];
  check_summable(name, dy, dtable);
  if (!accumulate) fill(dtable, 0);
  if (dy.numel() == 0) return;
  const RowSort sort(target_, ids, vocab, errors_.slot(DataError::embedding_id));
  with_two(dy.dtype(), dtable.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int pack = common_width<S, T>;
    const bool packs = width % pack == 0 && aligned_for_packs(dy.raw(), dtable.raw());
    const unsigned threads = row_threads(packs ? width / pack : width);
    const dim3 blocks(blocks_for(rows, 1, target_.processors, 64),
                      ceil_div(width, threads * (packs ? pack : 1)));
    launch(packs ? embedding_backward_kernel<pack, S, T> : embedding_backward_kernel<1, S, T>, blocks,
           threads, 0, target_.stream, sort.sorted(), rows, vocab, width, in<S>(dy), out<T>(dtable));
  });
}

void CudaKernels::add_positions(const Tensor& x, const Tensor& table, const Tensor& out, const Positions&) {
  require_alike("add_positions", out, {&x});
  const Count seq = check_positions("add_positions", x, table);
  require(table.dtype() == x.dtype(), "add_positions: dtypes differ: ", name_of(table.dtype()), " and ",
          name_of(x.dtype()));
  add_row(target_, x, table.rows(0, seq), out);
}

void CudaKernels::add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                                         const Positions&) {
  constexpr const char* name = "add_positions_backward";
  const Count used = check_positions(name, dy, dtable) * dtable.shape()[1];
  check_summable(name, dy, dtable);
  if (!accumulate && used < dtable.numel()) fill(dtable.range(used, dtable.numel()), 0);
  if (used == 0) return;
  with_two(dy.dtype(), dtable.dtype(), [&](auto a, auto b) {
    using S = decltype(a);
    using T = decltype(b);
    constexpr int width = common_width<S, T>;
    const bool packs = used % width == 0 && aligned_for_packs(dy.raw(), dtable.raw());
    launch(packs ? sum_repeats_kernel<width, S, T> : sum_repeats_kernel<1, S, T>,
           ceil_div(used, packs ? element_threads * width : element_threads), element_threads, 0,
           target_.stream, in<S>(dy), used, dy.numel() / used, out<T>(dtable), accumulate);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
