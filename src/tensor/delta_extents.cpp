#include <algorithm>

#include "tensor/argument_checks.h"
#include "tensor/extents.h"

// Checks of the arguments of linear attention's kernels: the gated delta rule, its gates, and its
// convolution.

namespace sherd::tensor {

using Count = std::int64_t;

namespace {

/// Documents that lie behind each other in all rows, none over the end of a sequence.
void check_documents(const char* kernel, const Documents* documents, Count batch, Count rows) {
  if (!documents) return;
  require(documents->size() >= 2 && documents->front() == 0 && documents->back() == batch * rows &&
              std::is_sorted(documents->begin(), documents->end()),
          kernel, ": documents do not fill ", batch, " sequences of ", rows, " rows");
  for (Count sequence = 1; sequence < batch; ++sequence)
    require(std::binary_search(documents->begin(), documents->end(), sequence * rows), kernel,
            ": a document goes from one sequence into the next");
}

/// States of texts beside a call's sequences.
void check_store(const char* kernel, const StateStore& store, Count batch, const Shape& each, DType dtype) {
  if (!store.states) return;
  require(store.states.dtype() == dtype && store.states.shape().rank() == each.rank() + 1 &&
              store.states.numel() == store.states.shape()[0] * each.numel(),
          kernel, ": stored states are ", name_of(store.states.dtype()), " ", store.states.shape().str(),
          " and must be ", name_of(dtype), " [texts, …] of ", each.str());
  require_vector(kernel, "places", store.places, 3 * batch, DType::i32);
}

DeltaExtents delta_extents(const char* kernel, const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                           const Tensor& out) {
  require_floating(kernel, "qkv", qkv);
  DeltaExtents e;
  e.key_heads = rule.key_heads, e.value_heads = rule.value_heads, e.key_dim = rule.key_dim;
  require(e.key_heads >= 1 && e.value_heads >= 1 && e.value_heads % e.key_heads == 0, kernel, ": ",
          e.value_heads, " value heads cannot share ", e.key_heads, " key heads evenly");
  require(qkv.shape().rank() == 3, kernel, ": qkv is ", qkv.shape().str(),
          " and must be [batch, rows, width]");
  e.batch = qkv.shape()[0], e.rows = qkv.shape()[1], e.width = qkv.shape()[2];
  e.repeats = rule.repeats(), e.value_dim = rule.value_dim(e.width);
  e.blocks = (e.rows + Kernels::delta_block - 1) / Kernels::delta_block;
  require(e.key_dim >= 1 && e.value_dim >= 1 &&
              e.width == e.key_heads * (2 * e.key_dim + e.repeats * e.value_dim),
          kernel, ": a width of ", e.width, " does not hold ", e.key_heads, " key heads of ", e.key_dim,
          " and ", e.value_heads, " value heads");
  require_vector(kernel, "gates", gates, e.batch * e.rows * 2 * e.value_heads, compute_type(qkv.dtype()));
  require_vector(kernel, "out", out, e.batch * e.rows * e.value_heads * e.value_dim, qkv.dtype());
  return e;
}

}  // namespace

DeltaExtents check_delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                              const StateStore& store, const Tensor& states, const Tensor& out) {
  constexpr const char* name = "delta_rule";
  const DeltaExtents e = delta_extents(name, qkv, gates, rule, out);
  const DType compute = compute_type(qkv.dtype());
  if (!store.states) check_documents(name, rule.documents.get(), e.batch, e.rows);
  check_store(name, store, e.batch, {e.value_heads, e.key_dim, e.value_dim}, compute);
  require(!store.states || !states, name, ": states are kept for backward, or stored");
  if (states)
    require_vector(name, "states", states, e.batch * e.value_heads * e.blocks * e.key_dim * e.value_dim,
                   compute);
  return e;
}

DeltaExtents check_delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                       const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                       const Tensor& dgates) {
  constexpr const char* name = "delta_rule_backward";
  const DeltaExtents e = delta_extents(name, qkv, gates, rule, dout);
  check_documents(name, rule.documents.get(), e.batch, e.rows);
  require_vector(name, "states", states, e.batch * e.value_heads * e.blocks * e.key_dim * e.value_dim,
                 compute_type(qkv.dtype()));
  require_vector(name, "dqkv", dqkv, qkv.numel(), qkv.dtype());
  require_vector(name, "dgates", dgates, gates.numel(), gates.dtype());
  return e;
}

GateExtents check_delta_gates(const char* kernel, const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                              int key_heads, const Tensor& gates) {
  require_floating(kernel, "x", x);
  GateExtents e;
  e.heads = a_log.numel();
  require(key_heads >= 1 && e.heads >= 1 && e.heads % key_heads == 0 && x.numel() % (2 * e.heads) == 0,
          kernel, ": x is ", x.shape().str(), ", of ", e.heads, " value heads that ", key_heads,
          " key heads share");
  e.rows = x.numel() / (2 * e.heads), e.repeats = e.heads / key_heads;
  for (const auto& [what, vector] : {std::pair{"a_log", &a_log}, {"dt_bias", &dt_bias}})
    require_vector(kernel, what, *vector, e.heads, x.dtype());
  require_vector(kernel, "gates", gates, x.numel(), compute_type(x.dtype()));
  return e;
}

GateExtents check_delta_gates_backward(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                                       int key_heads, const Tensor& dgates, const Tensor& dx,
                                       const Tensor& parts) {
  constexpr const char* name = "delta_gates_backward";
  const GateExtents e = check_delta_gates(name, x, a_log, dt_bias, key_heads, dgates);
  require_vector(name, "dx", dx, x.numel(), x.dtype());
  require_vector(name, "parts", parts, x.numel(), dgates.dtype());
  return e;
}

ConvExtents check_short_conv(const char* kernel, const Tensor& x, const Tensor& weight,
                             const Documents* documents, const StateStore& store, const Tensor& out) {
  require_floating(kernel, "x", x);
  require(x.shape().rank() == 3 && weight.shape().rank() == 2 && weight.dtype() == x.dtype() &&
              weight.shape()[0] == x.shape()[2] && weight.shape()[1] >= 1 && weight.shape()[1] <= 8,
          kernel, ": x is ", x.shape().str(), " and weight ", weight.shape().str(),
          ", which must be [columns, taps] of at most 8 taps");
  const ConvExtents e{x.shape()[0], x.shape()[1], x.shape()[2], weight.shape()[1]};
  if (!store.states) check_documents(kernel, documents, e.batch, e.rows);
  check_store(kernel, store, e.batch, {e.taps - 1, e.columns}, x.dtype());
  require_vector(kernel, "out", out, x.numel(), x.dtype());
  return e;
}

ConvExtents check_short_conv_backward(const Tensor& x, const Tensor& weight, const Documents* documents,
                                      const Tensor& dout, const Tensor& dx, const Tensor& dweight) {
  constexpr const char* name = "short_conv_backward";
  const ConvExtents e = check_short_conv(name, x, weight, documents, {}, dout);
  if (dx) require_vector(name, "dx", dx, x.numel(), x.dtype());
  if (!dweight) return e;
  require(dweight.numel() == weight.numel(), name, ": a gradient of ", dweight.numel(), " elements for ",
          weight.numel());
  check_summable(name, x, dweight);
  return e;
}

}  // namespace sherd::tensor
