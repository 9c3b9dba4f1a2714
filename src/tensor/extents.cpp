#include "tensor/extents.h"

#include <cmath>

#include "tensor/argument_checks.h"

namespace sherd::tensor {
namespace {

using Count = std::int64_t;

/// The product of the leading extents, also of a tensor whose rows are empty.
Count rows_of(const Tensor& t) {
  Count rows = 1;
  for (int axis = 0; axis + 1 < t.shape().rank(); ++axis) rows *= t.shape()[axis];
  return rows;
}

/// Sets what numbers the scores.
void number_scores(const char* kernel, const ScoreIndex& scores, AttentionExtents& e) {
  e.score_heads = scores.heads != 0 ? scores.heads : e.heads;
  e.score_seq = scores.seq != 0 ? scores.seq : e.seq;
  require(scores.head >= 0 && scores.head + e.heads <= e.score_heads, kernel, ": ", e.heads,
          " heads from head ", scores.head, " on are not among ", e.score_heads);
  for (const std::int64_t first : {scores.query, scores.key})
    require(first >= 0 && first + e.seq <= e.score_seq, kernel, ": ", e.seq, " tokens from position ", first,
            " on are not in a sequence of ", e.score_seq);
  e.first_score = (scores.head * e.score_seq + scores.query) * e.score_seq + scores.key;
}

}  // namespace

void check_norm(const char* kernel, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& rstd) {
  require_floating(kernel, "x", x);
  require(x.shape().rank() >= 1, kernel, ": x needs at least one extent");
  const Count width = x.shape().back();
  require(width > 0 || x.numel() == 0, kernel, ": rows are empty");
  if (weight) require_vector(kernel, "weight", weight, width, x.dtype());
  if (bias) require_vector(kernel, "bias", bias, width, x.dtype());
  require_vector(kernel, "rstd", rstd, x.shape().rows(), compute_type(x.dtype()));
}

void check_norm_backward(const char* kernel, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                         const Tensor& dy, const Tensor& dx, const Tensor& dweight, const Tensor& dbias) {
  check_norm(kernel, x, weight, {}, rstd);
  require_alike(kernel, x, {&dy});
  if (dx) require_alike(kernel, x, {&dx});
  const Count width = x.shape().back();
  if (dweight) require_gradient(kernel, "dweight", dweight, width, x.dtype());
  if (dbias) require_gradient(kernel, "dbias", dbias, width, x.dtype());
}

Count check_embedding(const char* kernel, const Tensor& ids, const Tensor& table, const Tensor& values) {
  require_floating(kernel, "the table", table);
  require_floating(kernel, "the values", values);
  require(table.shape().rank() == 2, kernel, ": the table must be [vocab, width], not ", table.shape().str());
  const Count width = table.shape()[1];
  require(ids.defined() && ids.dtype() == DType::i32, kernel, ": ids must be int32");
  require(
      values.shape().rank() >= 1 && values.shape().back() == width && values.numel() == ids.numel() * width,
      kernel, ": ", ids.numel(), " ids and a table of ", table.shape().str(), " do not fit values of ",
      values.shape().str());
  return width;
}

Count check_positions(const char* kernel, const Tensor& values, const Tensor& table) {
  require_floating(kernel, "the table", table);
  require_floating(kernel, "the values", values);
  require(
      table.shape().rank() == 2 && values.shape().rank() >= 2 && values.shape().back() == table.shape()[1],
      kernel, ": a table of ", table.shape().str(), " does not fit values of ", values.shape().str());
  const Count seq = values.shape()[-2];
  require(seq <= table.shape()[0], kernel, ": a sequence of ", seq, " is longer than the ", table.shape()[0],
          " learned positions. Shorten it, or give the model more positions");
  return seq;
}

void check_summable(const char* kernel, const Tensor& from, const Tensor& to) {
  require(compute_type(from.dtype()) == compute_type(to.dtype()), kernel, ": ", name_of(from.dtype()),
          " cannot be summed into ", name_of(to.dtype()));
}

RotaryExtents check_rotary(const Tensor& qkv, const Attention& geometry, double base, const Tensor& out) {
  require_alike("rotary", out, {&qkv});
  const int heads = geometry.heads, groups = geometry.kv_heads;
  require(heads >= 1 && groups >= 1 && heads % groups == 0, "rotary: ", heads, " heads cannot share ", groups,
          " key-value heads evenly");
  require(qkv.shape().rank() >= 2, "rotary: qkv must be [batch, seq, width], not ", qkv.shape().str());
  require(base > 0, "rotary: the base must be positive, not ", base);
  const Count width = qkv.shape().back(), head = geometry.head_dim(width);
  require(head * (heads + 2 * groups) == width && head % 2 == 0, "rotary: a width of ", width,
          " does not hold ", heads, " query and ", groups, " key and value heads of an even size");
  return {qkv.shape().rows(), qkv.shape()[-2], head};
}

Count check_cross_entropy(const char* kernel, const Tensor& logits, const Tensor& targets, const Tensor& lse,
                          Count valid) {
  require_floating(kernel, "logits", logits);
  require(logits.shape().rank() >= 1, kernel, ": logits must be [rows, vocab]");
  const Count vocab = logits.shape().back(), rows = logits.shape().rows();
  require(targets.defined() && targets.dtype() == DType::i32 && targets.numel() == rows, kernel,
          ": targets must be int32 with ", rows, " elements");
  require_vector(kernel, "lse", lse, rows, compute_type(logits.dtype()));
  require(valid >= 0 && valid <= vocab, kernel, ": ", valid, " valid columns of ", vocab);
  require(vocab > 0, kernel, ": logits have no columns");
  return valid == 0 ? vocab : valid;
}

AttentionExtents attention_extents(const char* kernel, const Tensor& qkv, const Attention& geometry) {
  require_floating(kernel, "qkv", qkv);
  AttentionExtents e;
  e.heads = geometry.heads, e.kv_heads = geometry.kv_heads;
  require(e.heads >= 1 && e.kv_heads >= 1 && e.heads % e.kv_heads == 0, kernel, ": ", e.heads,
          " query heads cannot share ", e.kv_heads, " key-value heads evenly");
  require(qkv.shape().rank() == 3 && qkv.shape()[2] % (e.heads + 2 * e.kv_heads) == 0, kernel, ": qkv is ",
          qkv.shape().str(), " and must be [batch, seq, (", e.heads, " + 2·", e.kv_heads, ")·head_dim]");
  e.batch = qkv.shape()[0], e.seq = qkv.shape()[1];
  e.dim = geometry.head_dim(qkv.shape()[2]);
  require(e.dim >= 1, kernel, ": heads are empty");
  e.scale =
      geometry.scale != 0 ? static_cast<double>(geometry.scale) : 1 / std::sqrt(static_cast<double>(e.dim));
  require(e.scale > 0, kernel, ": scale ", geometry.scale, " is not positive");
  require(geometry.dropout >= 0 && geometry.dropout < 1, kernel, ": dropout ", geometry.dropout,
          " is outside [0, 1)");
  number_scores(kernel, geometry.scores, e);
  return e;
}

AttentionExtents check_attention(const char* kernel, const Tensor& qkv, const Attention& geometry,
                                 const Tensor& out, const Tensor& lse) {
  const AttentionExtents e = attention_extents(kernel, qkv, geometry);
  require_vector(kernel, "out", out, e.batch * e.seq * e.heads * e.dim, qkv.dtype());
  require_vector(kernel, "lse", lse, e.batch * e.heads * e.seq, compute_type(qkv.dtype()));
  return e;
}

AttentionExtents check_attention_backward(const char* kernel, const Tensor& qkv, const Attention& geometry,
                                          const Tensor& out, const Tensor& lse, const Tensor& dout,
                                          const Tensor& dqkv) {
  const AttentionExtents e = check_attention(kernel, qkv, geometry, out, lse);
  require_vector(kernel, "dout", dout, out.numel(), qkv.dtype());
  require_vector(kernel, "dqkv", dqkv, qkv.numel(), qkv.dtype());
  return e;
}

MatmulExtents check_matmul(const Matmul& args) {
  const Tensor &a = args.a, &b = args.b, &c = args.c;
  require(a && b && c, "matmul: a, b and c must be defined");
  require(a.shape().rank() >= 1 && b.shape().rank() >= 1 && c.shape().rank() >= 1,
          "matmul: a scalar has no rows");
  require(is_floating(a.dtype()) && a.dtype() == b.dtype(), "matmul: a is ", name_of(a.dtype()), " and b is ",
          name_of(b.dtype()), "; both must have one floating dtype");
  require(c.dtype() == a.dtype() || (c.dtype() == DType::f32 && a.dtype() != DType::f64), "matmul: c is ",
          name_of(c.dtype()), " and must be ", name_of(a.dtype()), a.dtype() == DType::f64 ? "" : " or fp32");
  MatmulExtents e;
  e.m = args.trans_a ? a.shape().back() : rows_of(a);
  e.k = args.trans_a ? rows_of(a) : a.shape().back();
  e.n = args.trans_b ? rows_of(b) : b.shape().back();
  const Count k = args.trans_b ? b.shape().back() : rows_of(b);
  require(k == e.k, "matmul: a is ", a.shape().str(), args.trans_a ? " transposed" : "", " and b ",
          b.shape().str(), args.trans_b ? " transposed" : "", ": the inner extents ", e.k, " and ", k,
          " differ");
  require(rows_of(c) == e.m && c.shape().back() == e.n, "matmul: c is ", c.shape().str(), " and must hold ",
          e.m, " rows of ", e.n);
  if (args.bias)
    require(args.bias.numel() == e.n && args.bias.dtype() == a.dtype(), "matmul: bias is ",
            name_of(args.bias.dtype()), " ", args.bias.shape().str(), " and must be ", name_of(a.dtype()),
            " [", e.n, "]");
  require(args.activation == Activation::none || !args.accumulate,
          "matmul: an activation cannot follow accumulate");
  if (args.pre_activation)
    require(args.pre_activation.numel() == e.m * e.n && args.pre_activation.dtype() == c.dtype(),
            "matmul: pre_activation is ", name_of(args.pre_activation.dtype()), " ",
            args.pre_activation.shape().str(), " and must match c, ", name_of(c.dtype()), " ",
            c.shape().str());
  return e;
}

}  // namespace sherd::tensor
