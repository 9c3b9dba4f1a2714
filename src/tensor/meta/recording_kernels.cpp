#include "tensor/meta/recording_kernels.h"

#include <algorithm>
#include <cmath>

#include "tensor/extents.h"

namespace sherd::tensor::meta {
namespace {

double bytes_of(std::int64_t elements, DType dtype) {
  return static_cast<double>(elements) * static_cast<double>(size_of(dtype));
}

/// The scores of one head that some query of the call's first sequence sees.
double seen_scores(const AttentionExtents& e) {
  double sum = 0;
  for (std::int64_t i = 0; i < e.seq; ++i)
    sum += static_cast<double>(std::max<std::int64_t>(0, e.seen.end(i, e.seq) - e.seen.first(i)));
  return sum;
}

}  // namespace

void RecordingKernels::matmul(const Matmul& args) {
  const MatmulExtents e = check_matmul(args);
  // Values are made of blocks as dequantize() makes them, only nearer; the product has them at hand.
  if (args.stored_b)
    tell({.family = KernelFamily::movement,
          .dtype = args.a.dtype(),
          .bytes = static_cast<double>(args.stored_b.blocks.bytes()) + bytes_of(e.n * e.k, args.a.dtype())});
  KernelWork work{.family = KernelFamily::gemm, .rows = e.m, .columns = e.n, .depth = e.k};
  work.weight_gradient = args.trans_a;
  work.flops = 2.0 * static_cast<double>(e.m) * static_cast<double>(e.n) * static_cast<double>(e.k);
  work.fp8 = static_cast<bool>(args.fp8_a);
  for (const Tensor& x : {args.a, args.b, args.c, args.fp8_a.codes, args.fp8_a.scales, args.fp8_b.codes,
                          args.fp8_b.scales, args.bias, args.pre_activation})
    add(work, x);
  if (args.accumulate) add(work, args.c);
  if (work.fp8) work.dtype = DType::bf16;  // beside whose rate theirs is told
  tell(work);
  inner_->matmul(args);
}

/// Where a scale is of a tensor or a row, all of it is seen once before it is quantised.
void RecordingKernels::to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) {
  if (to.rule.scaling == Fp8Scaling::tensor || to.rule.scaling == Fp8Scaling::rows) {
    const auto scales = static_cast<double>(to.scales.bytes());
    tell({.family = KernelFamily::movement,
          .dtype = x.dtype(),
          .bytes = static_cast<double>(x.bytes()) + scales});
    tell({.family = KernelFamily::movement, .dtype = to.scales.dtype(), .bytes = 2 * scales});
  }
  KernelWork work{.family = KernelFamily::movement};
  add(work, x), add(work, to), add(work, lost);
  tell(work);
  inner_->to_fp8(x, transposed, to, lost);
}

void RecordingKernels::copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows,
                                 std::int64_t columns, bool accumulate) {
  const std::int64_t elements = rows * columns;
  tell({.family = KernelFamily::movement,
        .dtype = from.tensor.dtype(),
        .bytes = bytes_of(elements, from.tensor.dtype()) +
                 bytes_of(accumulate ? 2 * elements : elements, to.tensor.dtype())});
  inner_->copy_rows(from, to, rows, columns, accumulate);
}

void RecordingKernels::copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) {
  tell({.family = KernelFamily::movement, .dtype = to.dtype(), .bytes = 2 * static_cast<double>(to.bytes())});
  inner_->copy_strided(from, strides, to);
}

void RecordingKernels::embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                                 const VocabSlice& slice) {
  tell({.family = KernelFamily::embedding,
        .dtype = table.dtype(),
        .bytes = static_cast<double>(ids.bytes()) + 2 * static_cast<double>(out.bytes())});
  inner_->embedding(ids, table, out, slice);
}

void RecordingKernels::embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable,
                                          bool accumulate, const VocabSlice& slice,
                                          std::optional<DType> fold) {
  double bytes = static_cast<double>(ids.bytes() + dy.bytes()) + 2 * bytes_of(dy.numel(), dtable.dtype());
  if (!accumulate && !fold) bytes += static_cast<double>(dtable.bytes());
  tell({.family = KernelFamily::embedding, .dtype = dy.dtype(), .bytes = bytes});
  inner_->embedding_backward(ids, dy, dtable, accumulate, slice, fold);
}

void RecordingKernels::tell_attention(KernelWork work, const Tensor& qkv, const Attention& geometry) {
  const AttentionExtents e = attention_extents("attention", qkv, geometry);
  const double seen = seen_scores(e), rows = static_cast<double>(e.seq);
  work.family = KernelFamily::attention, work.dtype = qkv.dtype();
  work.scores = static_cast<double>(e.batch * e.heads) * seen;
  work.pairs = static_cast<double>(e.batch * e.heads * e.seq) * static_cast<double>(e.seq);
  work.keys = std::min<std::int64_t>(e.seq, std::llround(std::ceil(2 * seen / rows)));
  work.depth = e.dim;
  work.flops = (work.backward ? 8 : 4) * static_cast<double>(e.dim) * work.scores;
  tell(work);
}

void RecordingKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                 const Tensor& lse) {
  KernelWork work;
  for (const Tensor& x : {qkv, out, lse}) add(work, x);
  tell_attention(work, qkv, geometry);
  inner_->attention(qkv, geometry, out, lse);
}

void RecordingKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                          const Tensor& lse, const Tensor& dout, const Tensor& dqkv) {
  KernelWork work{.backward = true};
  for (const Tensor& x : {qkv, out, lse, dout, dqkv}) add(work, x);
  tell_attention(work, qkv, geometry);
  inner_->attention_backward(qkv, geometry, out, lse, dout, dqkv);
}

void RecordingKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                     const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  const std::int64_t seen = std::min(e.window, e.capacity);
  KernelWork work{.family = KernelFamily::attention};
  for (const Tensor& x : {qkv, out}) add(work, x);
  work.bytes += (store.values ? 2 : 1) * bytes_of(e.batch * e.kv_heads * seen * e.dim, qkv.dtype());
  work.keys = seen, work.depth = e.dim;
  if (out.defined())
    work.scores = work.pairs = static_cast<double>(e.batch * e.heads * e.seq) * static_cast<double>(seen);
  work.flops = 4 * static_cast<double>(e.dim) * work.scores;
  tell(work);
  inner_->attend_stored(qkv, geometry, store, sinks, out);
}

/// As attention to the rows of a block and to its state.
void RecordingKernels::tell_delta(KernelWork work, const DeltaExtents& e) {
  const double rows = static_cast<double>(e.batch * e.rows),
               block = static_cast<double>(Kernels::delta_block), dk = static_cast<double>(e.key_dim),
               dv = static_cast<double>(e.value_dim);
  const double of_keys = static_cast<double>(e.key_heads) * 2 * block * dk,
               of_values = static_cast<double>(e.value_heads) * (3 * dk * dv + 1.5 * block * dv);
  work.family = KernelFamily::attention;
  work.flops = (work.backward ? 3 : 1) * 2 * rows * (of_keys + of_values);
  work.scores = work.pairs = rows * static_cast<double>(e.value_heads) * block;
  work.keys = std::min(e.rows, Kernels::delta_block), work.depth = e.value_dim;
  tell(work);
}

void RecordingKernels::delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                  const StateStore& store, const Tensor& states, const Tensor& out) {
  const DeltaExtents e = check_delta_rule(qkv, gates, rule, store, states, out);
  KernelWork work;
  for (const Tensor& x : {qkv, gates, states, out}) add(work, x);
  if (store.states)  // read and written, of each text of the call
    work.bytes += 2 * bytes_of(e.batch * e.value_heads * e.key_dim * e.value_dim, store.states.dtype());
  tell_delta(work, e);
  inner_->delta_rule(qkv, gates, rule, store, states, out);
}

void RecordingKernels::delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                           const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                           const Tensor& dgates) {
  const DeltaExtents e = check_delta_rule_backward(qkv, gates, rule, states, dout, dqkv, dgates);
  KernelWork work{.backward = true};
  for (const Tensor& x : {qkv, gates, states, dout, dqkv, dgates}) add(work, x);
  tell_delta(work, e);
  inner_->delta_rule_backward(qkv, gates, rule, states, dout, dqkv, dgates);
}

/// Experts' rows are counted on the host, which tells it what to queue for them.
void RecordingKernels::route(const Tensor& logits, const Tensor& bias, const Routing& routing,
                             const Tensor& scores, const Tensor& chosen, const Tensor& weights) {
  KernelWork work{.family = KernelFamily::routing, .host_reads = true};
  for (const Tensor& x : {logits, bias, scores, chosen, weights}) add(work, x);
  tell(work);
  inner_->route(logits, bias, routing, scores, chosen, weights);
}

void RecordingKernels::combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                    const Tensor& out) {
  KernelWork work{.family = KernelFamily::routing};
  for (const Tensor& x : {out, places, weights}) add(work, x);
  work.bytes += bytes_of(places.numel() * out.shape().back(), rows.dtype());
  tell(work);
  inner_->combine_rows(rows, places, weights, out);
}

void RecordingKernels::combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                             const Tensor& dout, const Tensor& drows,
                                             const Tensor& dweights) {
  KernelWork work{.family = KernelFamily::routing};
  for (const Tensor& x : {dout, places, weights, dweights}) add(work, x);
  const std::int64_t elements = places.numel() * dout.shape().back();
  if (dweights.defined()) work.bytes += bytes_of(elements, rows.dtype());
  if (drows.defined()) work.bytes += bytes_of(elements, drows.dtype());
  tell(work);
  inner_->combine_rows_backward(rows, places, weights, dout, drows, dweights);
}

}  // namespace sherd::tensor::meta
