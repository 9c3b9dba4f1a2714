#include "tensor/cuda/cudnn/attention_graph.h"

#include <cudnn_graph.h>

#include "tensor/cuda/workspace.h"

// Attention as a graph of cuDNN's operations, which its attention engines recognise and run as one kernel
// each way. They do so by the shape of the graph: the operations, their order and which tensors have memory
// are what cuDNN's own front end builds (its public documentation and sources say so), and should be changed
// with care.
//
// Query heads lie beside the key and value head that they share. So with several heads in several groups no
// one stride leads from query head to query head: several sequences are regrouped by kind of head, and of one
// the groups take the place of sequences.

namespace sherd::tensor::SHERD_CUDA::cudnn {
namespace {

using Count = std::int64_t;

/// Keys, values or their gradients as they lie in the packed projections, and with rows and columns
/// exchanged.
GraphTensor key_node(OperationGraph& graph, const GraphSlice& s, Enum type, Id id) {
  return graph.tensor(type, {s.batch, s.kv_heads, s.seq, s.dim}, {s.batch_stride, s.kv_stride, s.row, 1},
                      OperationGraph::Kind::memory, id);
}
GraphTensor transposed_key_node(OperationGraph& graph, const GraphSlice& s, Enum type, Id id) {
  return graph.tensor(type, {s.batch, s.kv_heads, s.dim, s.seq}, {s.batch_stride, s.kv_stride, 1, s.row},
                      OperationGraph::Kind::memory, id);
}
/// Queries or their gradients likewise.
GraphTensor query_node(OperationGraph& graph, const GraphSlice& s, Enum type, Id id) {
  return graph.tensor(type, {s.batch, s.heads, s.seq, s.dim}, {s.batch_stride, s.head_stride, s.row, 1},
                      OperationGraph::Kind::memory, id);
}

/// The tensors that both graphs have.
struct Inputs {
  GraphTensor q, k_transposed, lse;
  Extents4 scores, rows;  ///< [batch, heads, seq, seq] and [batch, heads, seq, 1]

  Inputs(OperationGraph& graph, const GraphSlice& s, Enum type)
      : q(query_node(graph, s, type, q_id)),
        k_transposed(transposed_key_node(graph, s, type, k_id)),
        lse(graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq, 1}, {s.heads * s.seq, s.seq, 1, 1},
                         OperationGraph::Kind::memory, lse_id)),
        scores{s.batch, s.heads, s.seq, s.seq},
        rows{s.batch, s.heads, s.seq, 1} {}
};

GraphTensor result_node(OperationGraph& graph, const GraphSlice& s, Enum type, Id id) {
  return graph.tensor(type, {s.batch, s.heads, s.seq, s.dim}, {s.out_batch_stride, s.dim, s.out_row, 1},
                      OperationGraph::Kind::memory, id);
}

GraphTensor mask_causal(OperationGraph& graph, const GraphTensor& scores) {
  const GraphTensor row = graph.index(scores, 2), column = graph.index(scores, 3);
  const GraphTensor seen = graph.between(scores.extents, CUDNN_DATA_BOOLEAN),
                    masked = graph.number(masked_id);
  graph.pointwise_into(seen, CUDNN_POINTWISE_CMP_GE, row, &column, nullptr, CUDNN_DATA_BOOLEAN);
  GraphTensor out = graph.between(scores.extents);
  graph.pointwise_into(out, CUDNN_POINTWISE_BINARY_SELECT, scores, &masked, &seen);
  return out;
}

/// to = transpose(rows)·columns, summed over the query heads that share a key-value head.
void transposed_product(OperationGraph& graph, const GraphSlice& s, Enum type, const GraphTensor& rows,
                        const GraphTensor& columns, Id id) {
  const Extents4 transposed{s.batch, s.heads, s.seq, s.seq};
  const GraphTensor view = graph.tensor(type, transposed, {s.heads * s.seq * s.seq, s.seq * s.seq, 1, s.seq},
                                        OperationGraph::Kind::between);
  graph.view(rows, view);
  const GraphTensor to = key_node(graph, s, type, id);
  if (s.heads == s.kv_heads) return graph.matmul(view, columns, to);
  const GraphTensor every = graph.between({s.batch, s.heads, s.seq, s.dim}, type);
  graph.matmul(view, columns, every);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, every, to);
}

}  // namespace

GraphSlice slice_of(const AttentionExtents& e, bool regrouped) {
  const Count out_row = e.heads * e.dim;
  if (!regrouped && regroups(e))
    return {e.kv_heads, e.group(),         1,      e.seq, e.dim, (e.group() + 2) * e.dim, e.dim, e.dim,
            e.width(),  e.group() * e.dim, out_row};
  const Count step = !regrouped && e.group() == 1 ? 3 * e.dim : e.dim;
  return {e.batch, e.heads, e.kv_heads, e.seq,           e.dim,  e.seq * e.width(),
          step,    step,    e.width(),  e.seq * out_row, out_row};
}

bool stays_aligned(const AttentionExtents& e, const GraphSlice& slice) {
  const bool only_one = slice.batch * slice.heads == e.batch * e.heads;
  return only_one || slice.heads * slice.seq % 4 == 0;
}

OperationGraph forward_graph(const GraphSlice& s, Enum type, bool causal) {
  OperationGraph graph;
  const Inputs in(graph, s, type);
  const GraphTensor v = key_node(graph, s, type, v_id), out = result_node(graph, s, type, out_id);
  GraphTensor scores = graph.between(in.scores);
  graph.matmul(in.q, in.k_transposed, scores);
  scores = graph.pointwise(CUDNN_POINTWISE_MUL, scores, graph.number(scale_id));
  if (causal) scores = mask_causal(graph, scores);
  const GraphTensor top = graph.between(in.rows), sum = graph.between(in.rows);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, top);
  const GraphTensor weights =
      graph.pointwise(CUDNN_POINTWISE_EXP, graph.pointwise(CUDNN_POINTWISE_SUB, scores, top));
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum);
  const GraphTensor log = graph.pointwise(CUDNN_POINTWISE_LOG, sum);
  graph.pointwise_into(in.lse, CUDNN_POINTWISE_ADD, top, &log);
  const GraphTensor normal = graph.between(in.scores, type);
  graph.pointwise_into(normal, CUDNN_POINTWISE_DIV, weights, &sum);
  graph.matmul(normal, v, out);
  return graph;
}

OperationGraph backward_graph(const GraphSlice& s, Enum type, bool causal, bool deterministic) {
  OperationGraph graph;
  const Inputs in(graph, s, type);
  const GraphTensor v_transposed = transposed_key_node(graph, s, type, v_id);
  const GraphTensor out = result_node(graph, s, type, out_id), dout = result_node(graph, s, type, dout_id);
  const GraphTensor products = graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq, s.dim},
                                            {s.heads * s.seq * s.dim, s.seq * s.dim, s.heads * s.dim, 1},
                                            OperationGraph::Kind::between);
  graph.pointwise_into(products, CUDNN_POINTWISE_MUL, dout, &out);
  const GraphTensor sums = graph.between(in.rows), one = graph.number(one_id), scale = graph.number(scale_id);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  const GraphTensor delta =
      graph.tensor(CUDNN_DATA_FLOAT, in.rows, dense(in.rows), OperationGraph::Kind::memory, delta_id);
  graph.pointwise_into(delta, CUDNN_POINTWISE_MUL, sums, &one);

  GraphTensor scores = graph.between(in.scores);
  graph.matmul(in.q, in.k_transposed, scores);
  scores = graph.pointwise(CUDNN_POINTWISE_MUL, scores, scale);
  scores = graph.pointwise(CUDNN_POINTWISE_SUB, scores, in.lse);
  if (causal) scores = mask_causal(graph, scores);
  const GraphTensor weights = graph.pointwise(CUDNN_POINTWISE_EXP, scores);
  transposed_product(graph, s, type, weights, dout, dv_id);

  GraphTensor slopes = graph.between(in.scores);
  graph.matmul(dout, v_transposed, slopes);
  slopes = graph.pointwise(CUDNN_POINTWISE_SUB, slopes, delta);
  slopes = graph.pointwise(CUDNN_POINTWISE_MUL, slopes, weights);
  slopes = graph.pointwise(CUDNN_POINTWISE_MUL, slopes, scale);
  transposed_product(graph, s, type, slopes, in.q, dk_id);

  const GraphTensor keys =
      graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.kv_heads, s.seq, s.dim},
                   {s.batch_stride, s.kv_stride, s.row, 1}, OperationGraph::Kind::between);
  graph.view(in.k_transposed, keys);
  const GraphTensor dq = query_node(graph, s, type, dq_id);
  if (deterministic) {
    graph.matmul(slopes, keys, dq);
    return graph;
  }
  const Extents4 extents{s.batch, s.heads, s.seq, s.dim};
  const GraphTensor dq_sums =
      graph.tensor(CUDNN_DATA_FLOAT, extents, dense(extents), OperationGraph::Kind::memory, dq_sums_id);
  graph.matmul(slopes, keys, dq_sums);
  graph.pointwise_into(dq, CUDNN_POINTWISE_IDENTITY, dq_sums);
  return graph;
}

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
