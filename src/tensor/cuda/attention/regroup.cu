#include "tensor/cuda/attention/attention_library.h"

#include "tensor/cuda/families.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr int width = 8;

struct RegroupArguments {
  const bf16* from;  ///< bits of either dtype of two bytes
  bf16* to;
  Count rows;
  int heads, kv_heads, head_packs;
  bool by_group;
};

/// A block has a row at a time, its threads the row's packs.
__global__ void regroup_kernel(RegroupArguments a) {
  const int group = a.heads / a.kv_heads, slots = a.heads + 2 * a.kv_heads, packs = slots * a.head_packs;
  for (int at = static_cast<int>(threadIdx.x); at < packs; at += static_cast<int>(blockDim.x)) {
    const int slot = at / a.head_packs, g = slot / (group + 2), r = slot % (group + 2);
    const int kind = r < group ? g * group + r : a.heads + (r - group) * a.kv_heads + g;
    const Count by_group = at, by_kind = kind * a.head_packs + at % a.head_packs;
    const Count source = a.by_group ? by_kind : by_group, target = a.by_group ? by_group : by_kind;
    for (Count row = blockIdx.x; row < a.rows; row += gridDim.x)
      store_pack(a.to + (row * packs + target) * width,
                 load_pack<width>(a.from + (row * packs + source) * width));
  }
}

}  // namespace

void regroup_heads(const Target& target, const AttentionExtents& e, const void* from, void* to,
                   std::int64_t rows, bool by_group) {
  require(e.dim % width == 0 && aligned_for_packs(from, to), "regroup_heads: heads of ", e.dim,
          " elements are not whole packs");
  if (rows == 0) return;
  launch(regroup_kernel, blocks_for(rows, 4, target.processors), element_threads, 0, target.stream,
         RegroupArguments{static_cast<const bf16*>(from), static_cast<bf16*>(to), rows,
                          static_cast<int>(e.heads), static_cast<int>(e.kv_heads),
                          static_cast<int>(e.dim / width), by_group});
}

}  // namespace sherd::tensor::SHERD_CUDA
