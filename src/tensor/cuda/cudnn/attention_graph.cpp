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

/// The tensors that both graphs have.
struct Inputs {
  Node q, k_transposed, lse;
  Extents4 scores, rows;  ///< [batch, heads, seq, seq] and [batch, heads, seq, 1]

  Inputs(Graph& graph, const Slice& s, Enum type)
      : q(graph.tensor(type, {s.batch, s.heads, s.seq, s.dim}, {s.batch_stride, s.head_stride, s.row, 1},
                       Graph::Kind::memory, q_id)),
        k_transposed(graph.tensor(type, {s.batch, s.kv_heads, s.dim, s.seq},
                                  {s.batch_stride, s.kv_stride, 1, s.row}, Graph::Kind::memory, k_id)),
        lse(graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq, 1}, {s.heads * s.seq, s.seq, 1, 1},
                         Graph::Kind::memory, lse_id)),
        scores{s.batch, s.heads, s.seq, s.seq},
        rows{s.batch, s.heads, s.seq, 1} {}
};

Node result_node(Graph& graph, const Slice& s, Enum type, Id id) {
  return graph.tensor(type, {s.batch, s.heads, s.seq, s.dim}, {s.out_batch_stride, s.dim, s.out_row, 1},
                      Graph::Kind::memory, id);
}

Node mask_causal(Graph& graph, const Node& scores) {
  const Node row = graph.index(scores, 2), column = graph.index(scores, 3);
  const Node seen = graph.between(scores.extents, CUDNN_DATA_BOOLEAN), masked = graph.number(masked_id);
  graph.pointwise_into(seen, CUDNN_POINTWISE_CMP_GE, row, &column, nullptr, CUDNN_DATA_BOOLEAN);
  Node out = graph.between(scores.extents);
  graph.pointwise_into(out, CUDNN_POINTWISE_BINARY_SELECT, scores, &masked, &seen);
  return out;
}

/// to = transpose(rows)·columns, summed over the query heads that share a key-value head.
void transposed_product(Graph& graph, const Slice& s, Enum type, const Node& rows, const Node& columns,
                        Id id) {
  const Extents4 transposed{s.batch, s.heads, s.seq, s.seq};
  const Node view = graph.tensor(type, transposed, {s.heads * s.seq * s.seq, s.seq * s.seq, 1, s.seq},
                                 Graph::Kind::between);
  graph.view(rows, view);
  const Node to = graph.tensor(type, {s.batch, s.kv_heads, s.seq, s.dim},
                               {s.batch_stride, s.kv_stride, s.row, 1}, Graph::Kind::memory, id);
  if (s.heads == s.kv_heads) return graph.matmul(view, columns, to);
  const Node every = graph.between({s.batch, s.heads, s.seq, s.dim}, type);
  graph.matmul(view, columns, every);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, every, to);
}

}  // namespace

Slice slice_of(const AttentionExtents& e, bool regrouped) {
  const Count out_row = e.heads * e.dim;
  if (!regrouped && regroups(e))
    return {e.kv_heads, e.group(),         1,      e.seq, e.dim, (e.group() + 2) * e.dim, e.dim, e.dim,
            e.width(),  e.group() * e.dim, out_row};
  const Count step = !regrouped && e.group() == 1 ? 3 * e.dim : e.dim;
  return {e.batch, e.heads, e.kv_heads, e.seq,           e.dim,  e.seq * e.width(),
          step,    step,    e.width(),  e.seq * out_row, out_row};
}

bool stays_aligned(const AttentionExtents& e, const Slice& slice) {
  const bool only_one = slice.batch * slice.heads == e.batch * e.heads;
  return only_one || slice.heads * slice.seq % 4 == 0;
}

Graph forward_graph(const Slice& s, Enum type, bool causal) {
  Graph graph;
  const Inputs in(graph, s, type);
  const Node v = graph.tensor(type, {s.batch, s.kv_heads, s.seq, s.dim},
                              {s.batch_stride, s.kv_stride, s.row, 1}, Graph::Kind::memory, v_id);
  const Node out = result_node(graph, s, type, out_id);
  Node scores = graph.between(in.scores);
  graph.matmul(in.q, in.k_transposed, scores);
  scores = graph.pointwise(CUDNN_POINTWISE_MUL, scores, graph.number(scale_id));
  if (causal) scores = mask_causal(graph, scores);
  const Node top = graph.between(in.rows), sum = graph.between(in.rows);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, top);
  const Node weights =
      graph.pointwise(CUDNN_POINTWISE_EXP, graph.pointwise(CUDNN_POINTWISE_SUB, scores, top));
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum);
  const Node log = graph.pointwise(CUDNN_POINTWISE_LOG, sum);
  graph.pointwise_into(in.lse, CUDNN_POINTWISE_ADD, top, &log);
  const Node normal = graph.between(in.scores, type);
  graph.pointwise_into(normal, CUDNN_POINTWISE_DIV, weights, &sum);
  graph.matmul(normal, v, out);
  return graph;
}

Graph backward_graph(const Slice& s, Enum type, bool causal, bool deterministic) {
  Graph graph;
  const Inputs in(graph, s, type);
  const Node v_transposed = graph.tensor(type, {s.batch, s.kv_heads, s.dim, s.seq},
                                         {s.batch_stride, s.kv_stride, 1, s.row}, Graph::Kind::memory, v_id);
  const Node out = result_node(graph, s, type, out_id), dout = result_node(graph, s, type, dout_id);
  const Node products =
      graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq, s.dim},
                   {s.heads * s.seq * s.dim, s.seq * s.dim, s.heads * s.dim, 1}, Graph::Kind::between);
  graph.pointwise_into(products, CUDNN_POINTWISE_MUL, dout, &out);
  const Node sums = graph.between(in.rows), one = graph.number(one_id), scale = graph.number(scale_id);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  const Node delta = graph.tensor(CUDNN_DATA_FLOAT, in.rows, dense(in.rows), Graph::Kind::memory, delta_id);
  graph.pointwise_into(delta, CUDNN_POINTWISE_MUL, sums, &one);

  Node scores = graph.between(in.scores);
  graph.matmul(in.q, in.k_transposed, scores);
  scores = graph.pointwise(CUDNN_POINTWISE_MUL, scores, scale);
  scores = graph.pointwise(CUDNN_POINTWISE_SUB, scores, in.lse);
  if (causal) scores = mask_causal(graph, scores);
  const Node weights = graph.pointwise(CUDNN_POINTWISE_EXP, scores);
  transposed_product(graph, s, type, weights, dout, dv_id);

  Node slopes = graph.between(in.scores);
  graph.matmul(dout, v_transposed, slopes);
  slopes = graph.pointwise(CUDNN_POINTWISE_SUB, slopes, delta);
  slopes = graph.pointwise(CUDNN_POINTWISE_MUL, slopes, weights);
  slopes = graph.pointwise(CUDNN_POINTWISE_MUL, slopes, scale);
  transposed_product(graph, s, type, slopes, in.q, dk_id);

  const Node keys = graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.kv_heads, s.seq, s.dim},
                                 {s.batch_stride, s.kv_stride, s.row, 1}, Graph::Kind::between);
  graph.view(in.k_transposed, keys);
  const Node dq = graph.tensor(type, {s.batch, s.heads, s.seq, s.dim},
                               {s.batch_stride, s.head_stride, s.row, 1}, Graph::Kind::memory, dq_id);
  if (deterministic) {
    graph.matmul(slopes, keys, dq);
    return graph;
  }
  const Extents4 extents{s.batch, s.heads, s.seq, s.dim};
  const Node dq_sums =
      graph.tensor(CUDNN_DATA_FLOAT, extents, dense(extents), Graph::Kind::memory, dq_sums_id);
  graph.matmul(slopes, keys, dq_sums);
  graph.pointwise_into(dq, CUDNN_POINTWISE_IDENTITY, dq_sums);
  return graph;
}

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
