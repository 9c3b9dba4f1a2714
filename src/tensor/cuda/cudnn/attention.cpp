#include <algorithm>
#include <compare>
#include <limits>
#include <map>

#include "base/log.h"
#include "tensor/cuda/attention_library.h"
#include "tensor/cuda/cudnn/graph.h"

// Attention as a graph of cuDNN's operations, which its attention engines recognise and run as one kernel
// each way. They do so by the shape of the graph: the operations, their order and which tensors have memory
// are what cuDNN's own front end builds (its public documentation and sources say so), and should be changed
// with care.
//
// Query heads lie beside the key and value head that they share. So with several heads in several groups no
// one stride leads from query head to query head; groups then take the place of sequences, and sequences are
// asked for one by one.

namespace sherd::tensor::SHERD_CUDA {
namespace {

using cudnn::Extents4;
using cudnn::Graph;
using cudnn::Node;
using cudnn::Plan;
using Count = std::int64_t;

/// Names of a plan's tensors.
enum Id : Count {
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
struct Slice {
  Count batch, heads, kv_heads, seq, dim;
  Count batch_stride, head_stride, kv_stride, row;  ///< of the packed projections
  Count out_batch_stride, out_row;                  ///< of the result, whose heads are dim apart
  auto operator<=>(const Slice&) const = default;
};

Slice slice_of(const AttentionExtents& e) {
  const Count out_row = e.heads * e.dim;
  if (e.group() == 1 || e.kv_heads == 1) {
    const Count step = e.group() == 1 ? 3 * e.dim : e.dim;
    return {e.batch, e.heads, e.kv_heads, e.seq,           e.dim,  e.seq * e.width(),
            step,    step,    e.width(),  e.seq * out_row, out_row};
  }
  return {e.kv_heads, e.group(),         1,      e.seq, e.dim, (e.group() + 2) * e.dim, e.dim, e.dim,
          e.width(),  e.group() * e.dim, out_row};
}

struct PlanKey {
  Slice slice;
  DType dtype;
  bool causal, backward, deterministic;
  auto operator<=>(const PlanKey&) const = default;
};

/// The tensors that both graphs have.
struct Inputs {
  Node q, k_transposed, lse;
  Extents4 scores, rows;  ///< [batch, heads, seq, seq] and [batch, heads, seq, 1]

  Inputs(Graph& graph, const Slice& s, cudnnDataType_t type)
      : q(graph.tensor(type, {s.batch, s.heads, s.seq, s.dim}, {s.batch_stride, s.head_stride, s.row, 1},
                       Graph::Kind::memory, q_id)),
        k_transposed(graph.tensor(type, {s.batch, s.kv_heads, s.dim, s.seq},
                                  {s.batch_stride, s.kv_stride, 1, s.row}, Graph::Kind::memory, k_id)),
        lse(graph.tensor(CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq, 1}, {s.heads * s.seq, s.seq, 1, 1},
                         Graph::Kind::memory, lse_id)),
        scores{s.batch, s.heads, s.seq, s.seq},
        rows{s.batch, s.heads, s.seq, 1} {}
};

Node result_node(Graph& graph, const Slice& s, cudnnDataType_t type, Id id) {
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

Graph forward_graph(const Slice& s, cudnnDataType_t type, bool causal) {
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

/// to = transpose(rows)·columns, summed over the query heads that share a key-value head.
void transposed_product(Graph& graph, const Slice& s, cudnnDataType_t type, const Node& rows,
                        const Node& columns, Id id) {
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

/// With `deterministic`, dq is a product of its own over whole rows of score gradients, which take workspace;
/// without, blocks of keys add to fp32 sums in any order.
Graph backward_graph(const Slice& s, cudnnDataType_t type, bool causal, bool deterministic) {
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
  const Node delta =
      graph.tensor(CUDNN_DATA_FLOAT, in.rows, cudnn::dense(in.rows), Graph::Kind::memory, delta_id);
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
      graph.tensor(CUDNN_DATA_FLOAT, extents, cudnn::dense(extents), Graph::Kind::memory, dq_sums_id);
  graph.matmul(slopes, keys, dq_sums);
  graph.pointwise_into(dq, CUDNN_POINTWISE_IDENTITY, dq_sums);
  return graph;
}

class CudnnAttention final : public AttentionLibrary {
 public:
  explicit CudnnAttention(const device::SHERD_CUDA::Target& target)
      : target_(target), version_(cudnnGetVersion()) {
    const cudnnStatus_t status = cudnnCreate(&handle_);
    if (status == CUDNN_STATUS_SUCCESS) return;
    handle_ = nullptr;
    log_warning("attention: own kernels instead of cuDNN's, which does not start: ",
                cudnnGetErrorString(status));
  }
  ~CudnnAttention() override {
    if (handle_) cudnnDestroy(handle_);
  }

  bool forward(const AttentionCall& call) override {
    return takes(call) &&
           run(call, {slice_of(call.extents), call.qkv.dtype(), call.geometry.causal, false, true});
  }

  bool backward(const AttentionCall& call, bool deterministic) override {
    // Up to 9.15 the last, partial tile of keys comes out wrong without a mask for padding.
    if (!takes(call) || (version_ <= 91500 && call.extents.seq % 128 != 0)) return false;
    return run(call, {slice_of(call.extents), call.qkv.dtype(), call.geometry.causal, true, deterministic});
  }

 private:
  /// What is worth asking the library for. The dropout mask is Sherd's own, so it never is with dropout.
  bool takes(const AttentionCall& call) const {
    const AttentionExtents& e = call.extents;
    const bool known_good = version_ >= 90100 && version_ != 91000 && version_ != 91001;
    if (!handle_ || !known_good || size_of(call.qkv.dtype()) != 2 || call.geometry.dropout > 0) return false;
    if (e.dim % 8 != 0 || e.dim > 256 || e.seq < 2) return false;
    for (const Tensor* t : {&call.qkv, &call.out, &call.lse, &call.dout, &call.dqkv})
      if (*t && reinterpret_cast<std::uintptr_t>(t->raw()) % 16 != 0) return false;
    return true;
  }

  /// The plan, or none where the library has no kernel; said once for every shape.
  const Plan* find(const PlanKey& key) {
    const auto [at, is_new] = plans_.try_emplace(key);
    if (!is_new) return at->second.get();
    try {
      const cudnnDataType_t type = key.dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
      const Graph graph = key.backward ? backward_graph(key.slice, type, key.causal, key.deterministic)
                                       : forward_graph(key.slice, type, key.causal);
      at->second = std::make_unique<Plan>(handle_, graph, key.deterministic);
    } catch (const Error& error) {
      log_info("attention", key.backward ? "'s gradient" : "", " for heads of ", key.slice.dim,
               ", sequences of ", key.slice.seq, " in ", name_of(key.dtype),
               ": own kernels instead of cuDNN's (", error.what(), ")");
    }
    return at->second.get();
  }

  /// The plan for as many of the slice's sequences at once as its workspace allows; `key` then says how many.
  const Plan* find_within_limit(PlanKey& key) {
    const Plan* plan = find(key);
    while (plan && plan->workspace() > most_workspace && key.slice.batch > 1) {
      key.slice.batch = (key.slice.batch + 1) / 2;
      plan = find(key);
    }
    return plan;
  }

  bool run(const AttentionCall& call, PlanKey key) {
    const Count batch = key.slice.batch;
    const Plan* whole = find_within_limit(key);
    PlanKey last = key;
    last.slice.batch = (batch - 1) % key.slice.batch + 1;
    const Plan* rest = last == key ? whole : find(last);
    if (!whole || !rest) return false;
    cudnn::check(cudnnSetStream(handle_, static_cast<cudaStream_t>(target_.stream)), "take a stream");
    // Parts run one after the other on the stream, so they share what they work in.
    const Slice& s = key.slice;
    const Work work{scratch(static_cast<Count>(std::max(whole->workspace(), rest->workspace()))),
                    scratch(key.backward ? s.batch * s.heads * s.seq * 4 : 0),
                    scratch(key.backward && !key.deterministic ? s.batch * s.heads * s.seq * s.dim * 4 : 0)};
    const AttentionExtents& e = call.extents;
    for (Count slice = 0; slice < e.batch * e.heads / (batch * s.heads); ++slice)
      for (Count first = 0; first < batch; first += s.batch) {
        const Offsets at{slice * e.seq * e.width() + first * s.batch_stride,
                         slice * e.seq * e.heads * e.dim + first * s.out_batch_stride,
                         (slice * e.heads + first * s.heads) * e.seq};
        if (work.sums && version_ < 90600) zero(work.sums);
        run_part(call, key, batch - first < s.batch ? *rest : *whole, at, work);
      }
    return true;
  }

  /// Memory of one call beside its tensors: cuDNN's own, row sums of dout·out, and dq in fp32.
  struct Work {
    Tensor workspace, delta, sums;
  };
  /// Elements from the beginning of the packed projections, the result and lse.
  struct Offsets {
    Count packed, result, lse;
  };

  Tensor scratch(Count bytes) const {
    return bytes ? Tensor::empty(target_.device, {bytes}, DType::u8, Category::workspace) : Tensor();
  }

  void zero(const Tensor& t) {
    const cudaError_t status =
        cudaMemsetAsync(t.raw(), 0, t.bytes(), static_cast<cudaStream_t>(target_.stream));
    require(status == cudaSuccess, "attention: memory could not be cleared: ", cudaGetErrorString(status));
  }

  void run_part(const AttentionCall& call, const PlanKey& key, const Plan& plan, const Offsets& from,
                const Work& work) {
    const AttentionExtents& e = call.extents;
    constexpr Count element = 2;
    const Count columns[3] = {e.query_col(0, 0), e.key_col(0), e.value_col(0)};
    float scale = static_cast<float>(e.scale), one = 1;
    // Older versions prefer a finite mask.
    float masked =
        version_ < 91000 ? std::numeric_limits<float>::lowest() : -std::numeric_limits<float>::infinity();
    std::vector<Count> ids;
    std::vector<void*> memory;
    const auto give = [&](int id, void* at) { ids.push_back(id), memory.push_back(at); };
    for (int part = 0; part < 3; ++part)
      give(q_id + part, call.qkv.raw() + (from.packed + columns[part]) * element);
    give(out_id, call.out.raw() + from.result * element);
    give(lse_id, call.lse.raw() + from.lse * 4);
    give(scale_id, &scale);
    if (key.causal) give(masked_id, &masked);
    if (key.backward) {
      give(dout_id, call.dout.raw() + from.result * element);
      for (int part = 0; part < 3; ++part)
        give(dq_id + part, call.dqkv.raw() + (from.packed + columns[part]) * element);
      give(delta_id, work.delta.raw());
      give(one_id, &one);
      if (work.sums) give(dq_sums_id, work.sums.raw());
    }
    plan.run(handle_, ids, memory, work.workspace ? work.workspace.raw() : nullptr);
  }

  /// The repeatable gradient holds rows of scores; more sequences than fit here are taken in parts.
  static constexpr std::size_t most_workspace = std::size_t{1} << 30;

  device::SHERD_CUDA::Target target_;
  std::size_t version_;
  cudnnHandle_t handle_ = nullptr;
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
};

}  // namespace

std::shared_ptr<AttentionLibrary> make_attention_library(const device::SHERD_CUDA::Target& target) {
  return std::make_shared<CudnnAttention>(target);
}

}  // namespace sherd::tensor::SHERD_CUDA
