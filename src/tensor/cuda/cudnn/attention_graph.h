#pragma once

#include <compare>

#include "tensor/cuda/cudnn/graph.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA::cudnn {

/// Names of a plan's tensors.
enum Id : std::int64_t {
  q_id = 1,
  k_id,
  v_id,
  out_id,
  lse_id,
  dout_id,
  dq_id,
  dk_id,
  dv_id,
  dq_sums_id,
  delta_id,
  scale_id,
  masked_id,
  one_id
};

/// One call of the library: `batch` sequences (or groups) of `heads` query and `kv_heads` key-value heads,
/// and the strides of its tensors.
struct GraphSlice {
  std::int64_t batch, heads, kv_heads, seq, dim;
  std::int64_t batch_stride, head_stride, kv_stride, row;  ///< strides of the packed projections
  std::int64_t out_batch_stride, out_row;  ///< strides of the result, whose heads are dim apart
  auto operator<=>(const GraphSlice&) const = default;
};

/// A call as one slice where heads lie as the graphs want them: `regrouped` by kind, or each query head
/// beside a key head of its own, or one for all. Else one sequence of it, whose groups take the place of
/// sequences.
GraphSlice slice_of(const AttentionExtents& e, bool regrouped);

/// Whether `slice` and those that follow it until the call is done all begin at multiples of 16 bytes, as the
/// graphs promise. Where there are several, their rows of lse may not.
bool stays_aligned(const AttentionExtents& e, const GraphSlice& slice);

OperationGraph forward_graph(const GraphSlice& s, Enum type, bool causal);
/// With `deterministic`, dq is a product of its own over whole rows of score gradients, which take workspace;
/// without, blocks of keys add to fp32 sums in any order.
OperationGraph backward_graph(const GraphSlice& s, Enum type, bool causal, bool deterministic);

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
