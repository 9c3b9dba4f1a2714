#include "tensor/cuda/row_sort.h"

#include "tensor/cuda/families.cuh"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr int sort_bits = 8, sort_warps = 8, sort_steps = 8;
static_assert(sort_digits == 1 << sort_bits && sort_tile == sort_warps * 32 * sort_steps);

/// The keys of the first pass; word of ids outside the vocabulary.
__global__ void sort_keys_kernel(const std::int32_t* ids, Count n, TableIds held, std::uint32_t* keys,
                                 std::uint32_t* rows, DataErrorSlot* wrong) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    const std::int32_t id = ids[i];
    if (id < 0 || id >= held.vocab) raise(wrong, i, id, held.vocab);
    const Count row = id - held.first;
    keys[i] = static_cast<std::uint32_t>(row >= 0 && row < held.rows ? row : held.rows);
    rows[i] = static_cast<std::uint32_t>(i);
  }
}

/// counts[digit, block] = how many keys of the block's tile have the digit.
__global__ void sort_count_kernel(const std::uint32_t* keys, Count n, int shift, std::uint32_t* counts) {
  SHERD_SHARED(std::uint32_t, mine, sort_digits);
  for (unsigned digit = threadIdx.x; digit < sort_digits; digit += blockDim.x) mine[digit] = 0;
  __syncthreads();
  const Count first = Count{blockIdx.x} * sort_tile;
  for (Count i = first + threadIdx.x; i < first + sort_tile && i < n; i += blockDim.x)
    atomicAdd(&mine[keys[i] >> shift & (sort_digits - 1u)], 1u);
  __syncthreads();
  for (unsigned digit = threadIdx.x; digit < sort_digits; digit += blockDim.x)
    counts[Count{digit} * gridDim.x + blockIdx.x] = mine[digit];
}

/// counts becomes the sum of what stands before each: where the tiles' digits go. One block, a thread per
/// digit.
__global__ void sort_scan_kernel(std::uint32_t* counts, Count blocks) {
  SHERD_SHARED(std::uint32_t, totals, sort_digits);
  std::uint32_t* mine = counts + Count{threadIdx.x} * blocks;
  std::uint32_t total = 0;
  for (Count block = 0; block < blocks; ++block) total += mine[block];
  totals[threadIdx.x] = total;
  __syncthreads();
  std::uint32_t before = 0;
  for (unsigned digit = 0; digit < threadIdx.x; ++digit) before += totals[digit];
  for (Count block = 0; block < blocks; ++block) {
    const std::uint32_t count = mine[block];
    mine[block] = before;
    before += count;
  }
}

/// Brings every key and row of the block's tile to its place. Each warp takes a sequence of the tile, 32 keys
/// after 32.
__global__ void sort_scatter_kernel(const std::uint32_t* keys, const std::uint32_t* rows, Count n, int shift,
                                    const std::uint32_t* counts, std::uint32_t* to_keys,
                                    std::uint32_t* to_rows) {
  SHERD_SHARED(std::uint32_t, next, sort_warps * sort_digits);  // where the warp's next key of a digit goes
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t* mine = next + warp * sort_digits;
  for (unsigned at = threadIdx.x; at < sort_warps * sort_digits; at += blockDim.x) next[at] = 0;
  __syncthreads();
  const Count first = Count{blockIdx.x} * sort_tile + Count{warp} * 32 * sort_steps + lane;
  for (int step = 0; step < sort_steps; ++step)
    if (first + step * 32 < n) atomicAdd(&mine[keys[first + step * 32] >> shift & (sort_digits - 1u)], 1u);
  __syncthreads();
  for (unsigned digit = threadIdx.x; digit < sort_digits; digit += blockDim.x) {
    std::uint32_t before = counts[Count{digit} * gridDim.x + blockIdx.x];
    for (int w = 0; w < sort_warps; ++w) {
      const std::uint32_t count = next[w * sort_digits + static_cast<int>(digit)];
      next[w * sort_digits + static_cast<int>(digit)] = before;
      before += count;
    }
  }
  __syncthreads();
  for (int step = 0; step < sort_steps; ++step) {
    const Count i = first + step * 32;
    const bool there = i < n;
    const std::uint32_t key = there ? keys[i] : 0, digit = key >> shift & (sort_digits - 1u);
    unsigned same = __ballot_sync(device::SHERD_CUDA::all_lanes, there);
    for (int bit = 0; bit < sort_bits; ++bit) {
      const unsigned set = __ballot_sync(device::SHERD_CUDA::all_lanes, digit >> bit & 1u);
      same &= digit >> bit & 1u ? set : ~set;
    }
    const auto rank = static_cast<std::uint32_t>(__popc(same & ((1u << lane) - 1u)));
    std::uint32_t place = 0;
    if (there) place = mine[digit] + rank;
    __syncwarp();
    if (there && rank == 0) mine[digit] += static_cast<std::uint32_t>(__popc(same));
    __syncwarp();
    if (!there) continue;
    to_keys[place] = key;
    to_rows[place] = rows[i];
  }
}

std::uint32_t* words(const Tensor& t) {
  return reinterpret_cast<std::uint32_t*>(t.raw());
}

}  // namespace

SortedRows RowSort::sorted() const {
  return {words(result_), words(result_) + rows_};
}

RowSort::RowSort(const Target& target, const Tensor& ids, const TableIds& held, DataErrorSlot* wrong)
    : rows_(ids.numel()) {
  const Count n = rows_, blocks = (n + sort_tile - 1) / sort_tile;
  require(n <= 0xffffffffll && held.rows < 0xffffffffll, "embedding_backward: too many ids");
  const auto get = [&](Count elements) {
    return Tensor::empty(target.device, {elements}, DType::i32, Category::workspace);
  };
  result_ = get(2 * n);
  const Tensor other = get(2 * n), counts = get(sort_digits * blocks);
  std::uint32_t *from = words(result_), *to = words(other);
  launch(sort_keys_kernel, blocks_for(n, element_threads, target.processors), element_threads, 0,
         target.stream, in<std::int32_t>(ids), n, held, from, from + n, wrong);
  for (int shift = 0; shift < 32 && held.rows >> shift != 0; shift += sort_bits) {
    launch(sort_count_kernel, static_cast<unsigned>(blocks), sort_warps * 32, 0, target.stream, from, n,
           shift, words(counts));
    launch(sort_scan_kernel, 1, sort_digits, 0, target.stream, words(counts), blocks);
    launch(sort_scatter_kernel, static_cast<unsigned>(blocks), sort_warps * 32, 0, target.stream, from,
           from + n, n, shift, words(counts), to, to + n);
    std::swap(from, to);
  }
  if (from != words(result_)) result_ = other;
}

}  // namespace sherd::tensor::SHERD_CUDA
