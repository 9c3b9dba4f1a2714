#include "tensor/extents.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tensor/argument_checks.h"
#include "tensor/formats/stored_format.h"

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

void check_documents(const char* kernel, const Documents& bounds, const AttentionExtents& e) {
  const Count rows = e.batch * e.seq;
  require(bounds.size() >= 2 && bounds.front() == 0 && bounds.back() == rows, kernel, ": ", bounds.size(),
          " bounds of documents do not go from 0 to ", rows, " rows");
  for (std::size_t i = 1; i < bounds.size(); ++i) {
    const Count begin = bounds[i - 1], end = bounds[i];
    require(begin <= end && (begin == end || begin / e.seq == (end - 1) / e.seq), kernel,
            ": a document of the rows ", begin, " to ", end, " is not within a sequence of ", e.seq);
  }
}

/// Rows that somebody reads, and with `apart` writes, lie within their tensor.
void check_rows(const char* name, const StridedRows& x, Count rows, Count columns, bool apart) {
  require(x.tensor.defined(), "copy_rows: ", name, " is not defined");
  if (rows == 0 || columns == 0) return;
  const Count least = apart && rows > 1 ? columns : 0;
  require(x.first >= 0 && x.stride >= least && x.first + (rows - 1) * x.stride + columns <= x.tensor.numel(),
          "copy_rows: ", rows, " rows of ", columns, ", from element ", x.first, " on in steps of ", x.stride,
          ", do not fit ", name, ", ", x.tensor.shape().str());
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
  if (table.dtype() != DType::i32) require_floating(kernel, "the table", table);
  if (table.dtype() != DType::i32) require_floating(kernel, "the values", values);
  require(table.shape().rank() == 2, kernel, ": the table must be [vocab, width], not ", table.shape().str());
  const Count width = table.shape()[1];
  require(ids.defined() && ids.dtype() == DType::i32, kernel, ": ids must be int32");
  require(
      values.shape().rank() >= 1 && values.shape().back() == width && values.numel() == ids.numel() * width,
      kernel, ": ", ids.numel(), " ids and a table of ", table.shape().str(), " do not fit values of ",
      values.shape().str());
  return width;
}

Count check_vocab_slice(const char* kernel, Count held, const VocabSlice& slice) {
  require(slice.first >= 0 && slice.ids >= 0, kernel, ": a part of the vocabulary from id ", slice.first,
          " on, of ", slice.ids, " ids");
  return slice.ids > 0 ? slice.ids : slice.first + held;
}

std::vector<PositionRange> position_ranges(const char* kernel, const Positions& positions, Count rows) {
  const auto& [first, count, second] = positions;
  const Count before = count == 0 ? rows : std::min(rows, count);
  require(first >= 0 && count >= 0 && (before == rows || second >= 0), kernel,
          ": positions must not be negative");
  std::vector<PositionRange> out;
  if (before > 0) out.push_back({0, first, before});
  if (before < rows) out.push_back({before, second, rows - before});
  if (out.size() < 2) return out;
  if (out[1].position < out[0].position) std::swap(out[0], out[1]);
  require(out[0].position + out[0].count <= out[1].position, kernel,
          ": two ranges of positions overlap: ", first, " to ", first + before, " and ", second, " to ",
          second + rows - before);
  return out;
}

std::vector<PositionRange> check_positions(const char* kernel, const Tensor& values, const Tensor& table,
                                           const Positions& positions) {
  require_floating(kernel, "the table", table);
  require_floating(kernel, "the values", values);
  require(
      table.shape().rank() == 2 && values.shape().rank() >= 2 && values.shape().back() == table.shape()[1],
      kernel, ": a table of ", table.shape().str(), " does not fit values of ", values.shape().str());
  const std::vector<PositionRange> ranges = position_ranges(kernel, positions, values.shape()[-2]);
  const Count seq = positions.end(values.shape()[-2]);
  require(seq <= table.shape()[0], kernel, ": a sequence of ", seq, " is longer than the ", table.shape()[0],
          " learned positions. Shorten it, or give the model more positions");
  return ranges;
}

void check_copy_rows(const StridedRows& from, const StridedRows& to, Count rows, Count columns,
                     bool accumulate) {
  require(rows >= 0 && columns >= 0, "copy_rows: ", rows, " rows of ", columns);
  check_rows("from", from, rows, columns, false);
  check_rows("to", to, rows, columns, true);
  const DType source = from.tensor.dtype(), target = to.tensor.dtype();
  require((source == target && !accumulate) || (is_floating(source) && is_floating(target)),
          "copy_rows: ", name_of(source), accumulate ? " cannot be added to " : " cannot become ",
          name_of(target));
}

void check_add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to) {
  require_floating("add_scaled", "from", from);
  require_floating("add_scaled", "to", to);
  require(from.numel() == to.numel(), "add_scaled: ", from.shape().str(), " and ", to.shape().str(),
          " differ in their number of elements");
  require_number("add_scaled", "the factor", factor);
}

void check_zero_pruned(const Tensor& weight, const Tensor& x) {
  require_floating("zero_pruned", "weight", weight);
  require_floating("zero_pruned", "x", x);
  require(weight.numel() == x.numel(), "zero_pruned: ", weight.shape().str(), " and ", x.shape().str(),
          " have different sizes");
}

void check_quotient(const Tensor& a, const Tensor& b, const Tensor& out) {
  require_number("quotient", "a", a);
  require_number("quotient", "b", b);
  require_number("quotient", "out", out);
}

void check_summable(const char* kernel, const Tensor& from, const Tensor& to) {
  require(compute_type(from.dtype()) == compute_type(to.dtype()), kernel, ": ", name_of(from.dtype()),
          " cannot be summed into ", name_of(to.dtype()));
}

RotaryExtents check_rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary,
                           const Tensor& out) {
  require_alike("rotary", out, {&qkv});
  const int heads = geometry.heads, groups = geometry.kv_heads;
  require(heads >= 1 && groups >= 1 && heads % groups == 0, "rotary: ", heads, " heads cannot share ", groups,
          " key-value heads evenly");
  require(qkv.shape().rank() >= 2, "rotary: qkv must be [batch, seq, width], not ", qkv.shape().str());
  check(rotary);
  const Count width = qkv.shape().back(), head = geometry.head_dim(width);
  require(head * (heads + 2 * groups) == width && head % 2 == 0, "rotary: a width of ", width,
          " does not hold ", heads, " query and ", groups, " key and value heads of an even size");
  const Count turned = rotary_size(rotary, head);
  require(turned > 0 && turned % 2 == 0, "rotary: ", turned, " of a head's ", head,
          " elements turn, which must be an even number of them");
  (void)position_ranges("rotary", geometry.positions, qkv.shape()[-2]);
  if (const Tensor& each = geometry.row_positions)
    require(
        each.dtype() == DType::i32 && each.numel() == qkv.shape().rows() && geometry.positions == Positions{},
        "rotary: positions of ", each.numel(), " rows, of which there are ", qkv.shape().rows());
  return {qkv.shape().rows(), qkv.shape()[-2], head, turned};
}

LossExtents check_cross_entropy(const char* kernel, const Tensor& logits, const Tensor& targets,
                                const Tensor& lse, const VocabSlice& slice) {
  require_floating(kernel, "logits", logits);
  require(logits.shape().rank() >= 1, kernel, ": logits must be [rows, vocab]");
  LossExtents e;
  e.columns = logits.shape().back(), e.rows = rows_of(logits);
  require(e.columns > 0, kernel, ": logits have no columns");
  e.first = slice.first, e.ids = check_vocab_slice(kernel, e.columns, slice);
  e.valid = std::clamp<Count>(e.ids - e.first, 0, e.columns);
  require(targets.defined() && targets.dtype() == DType::i32 && targets.numel() == e.rows, kernel,
          ": targets must be int32 with ", e.rows, " elements");
  require_vector(kernel, "lse", lse, e.rows, compute_type(logits.dtype()));
  return e;
}

Count check_cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                                const Tensor& lse_all, const Tensor& total) {
  constexpr const char* name = "cross_entropy_total";
  require(targets.defined() && targets.dtype() == DType::i32, name, ": targets must be int32");
  const Count rows = targets.numel();
  require(lse.defined() && (lse.dtype() == DType::f32 || lse.dtype() == DType::f64), name,
          ": lse must be fp32 or fp64");
  require(rows == 0 ? lse.numel() == 0 : lse.numel() >= rows && lse.numel() % rows == 0, name, ": lse is ",
          lse.shape().str(), " and must have ", rows, " elements for each part");
  require_vector(name, "picked", picked, lse.numel(), lse.dtype());
  require_vector(name, "lse_all", lse_all, rows, lse.dtype());
  require_vector(name, "total", total, 2, DType::f64);
  return rows == 0 ? 1 : lse.numel() / rows;
}

SeenKeys seen_keys(const char* kernel, const Attention& geometry, Count seq) {
  const Count window = geometry.window, offset = geometry.scores.query - geometry.scores.key;
  require(window >= 0, kernel, ": a window of ", window, " keys; 0 stands for none");
  SeenKeys seen{seq, seq};
  if (geometry.causal || window > 0)
    seen.ahead = std::clamp(offset + (geometry.causal ? 1 : window), -seq, seq);
  if (window > 0 && window - 1 < seq + offset) seen.behind = std::max(window - 1 - offset, -seq);
  return seen;
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
  e.scale = geometry.scale != 0 ? geometry.scale : 1 / std::sqrt(static_cast<double>(e.dim));
  require(e.scale > 0, kernel, ": scale ", geometry.scale, " is not positive");
  require(geometry.cap >= 0, kernel, ": scores capped at ", geometry.cap);
  e.cap = geometry.cap;
  require(geometry.dropout >= 0 && geometry.dropout < 1, kernel, ": dropout ", geometry.dropout,
          " is outside [0, 1)");
  number_scores(kernel, geometry.scores, e);
  e.seen = seen_keys(kernel, geometry, e.seq);
  if (geometry.documents) check_documents(kernel, *geometry.documents, e);
  return e;
}

std::vector<AttentionPart> attention_parts(const AttentionExtents& e, const Attention& geometry) {
  std::vector<AttentionPart> parts;
  const auto add = [&](Count begin, Count end) {
    if (begin == end) return;
    const Count b = begin / e.seq, first = begin % e.seq;
    AttentionPart part{e, begin, b * e.heads * e.seq + first, e.seq, geometry.key};
    part.batch = 1, part.seq = end - begin;
    part.seen = seen_keys("attention", geometry, part.seq);
    if (geometry.documents)
      part.key = geometry.key.at(static_cast<std::uint64_t>(b)),
      part.first_score += first * (e.score_seq + 1);
    else
      part.first_score = e.first_score_of(b, 0);
    parts.push_back(part);
  };
  if (!geometry.documents) {
    for (Count b = 0; b < e.batch; ++b) add(b * e.seq, (b + 1) * e.seq);
    return parts;
  }
  for (std::size_t i = 1; i < geometry.documents->size(); ++i)
    add((*geometry.documents)[i - 1], (*geometry.documents)[i]);
  std::ranges::stable_sort(parts, std::greater{}, &AttentionPart::seq);
  return parts;
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

StoredExtents check_attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                  const Tensor& sinks, const Tensor& out) {
  constexpr const char* name = "attend_stored";
  require(geometry.causal, name, ": texts that grow are causal");
  StoredExtents e{attention_extents(name, qkv, geometry)};
  const Tensor& values = store.values ? store.values : store.keys;
  require(store.keys && store.keys.shape().rank() == 4 && values.shape() == store.keys.shape() &&
              store.keys.dtype() == qkv.dtype() && values.dtype() == qkv.dtype(),
          name, ": keys and values must be ", name_of(qkv.dtype()), " [texts, kv_heads, capacity, head_dim]");
  e.texts = store.keys.shape()[0], e.capacity = store.keys.shape()[2];
  require(store.keys.shape() == Shape({e.texts, e.kv_heads, e.capacity, e.dim}) && e.capacity >= 1, name,
          ": keys are ", store.keys.shape().str(), ", of ", e.kv_heads, " heads of ", e.dim);
  require_vector(name, "places", store.places, 3 * e.batch, DType::i32);
  if (sinks) require_vector(name, "sinks", sinks, e.heads, qkv.dtype());
  if (out) require_vector(name, "out", out, e.batch * e.seq * e.heads * e.dim, qkv.dtype());
  e.window = geometry.window > 0 ? geometry.window : std::numeric_limits<Count>::max();
  return e;
}

SinkExtents check_attention_sinks(const char* kernel, const Tensor& sinks, const Tensor& out,
                                  const Tensor& lse) {
  require_floating(kernel, "out", out);
  require(lse.defined() && lse.shape().rank() == 3 && lse.dtype() == compute_type(out.dtype()), kernel,
          ": lse must be [batch, heads, seq] in the compute type of out");
  SinkExtents e{lse.shape()[0], lse.shape()[2], lse.shape()[1], 0};
  require_vector(kernel, "sinks", sinks, e.heads, out.dtype());
  const Count numbers = lse.numel();
  require(numbers == 0 ? out.numel() == 0 : out.numel() % numbers == 0, kernel, ": out is ",
          out.shape().str(), ", of ", e.heads, " heads in ", e.batch, " sequences of ", e.rows, " rows");
  e.dim = numbers == 0 ? 0 : out.numel() / numbers;
  return e;
}

SinkExtents check_attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                           const Tensor& dout, const Tensor& dsinks) {
  constexpr const char* name = "attention_sinks_backward";
  const SinkExtents e = check_attention_sinks(name, sinks, out, lse);
  require_vector(name, "dout", dout, out.numel(), out.dtype());
  require(dsinks.numel() == e.heads, name, ": a gradient of ", dsinks.numel(), " elements for ", e.heads,
          " heads");
  check_summable(name, out, dsinks);
  return e;
}

MergeExtents check_merge_attention(const Tensor& part, const Tensor& part_lse, Count first, const Tensor& out,
                                   const Tensor& lse) {
  constexpr const char* name = "merge_attention";
  require_floating(name, "part", part);
  const DType compute = compute_type(part.dtype());
  require(out.defined() && lse.defined() && part.shape().rank() == 3 && out.shape().rank() == 3 &&
              lse.shape().rank() == 3,
          name, ": part and out must be [batch, rows, width] and lse [batch, heads, seq]");
  MergeExtents e{part.shape()[0], part.shape()[1], out.shape()[1], lse.shape()[1], 0};
  const Count width = part.shape()[2];
  require(e.heads >= 1 && width % e.heads == 0, name, ": rows of ", width, " do not hold ", e.heads,
          " heads");
  e.dim = width / e.heads;
  require(first >= 0 && first + e.rows <= e.seq, name, ": rows ", first, " to ", first + e.rows,
          " are not among ", e.seq);
  require_vector(name, "part_lse", part_lse, e.batch * e.heads * e.rows, compute);
  require(out.shape() == Shape({e.batch, e.seq, width}) && out.dtype() == compute, name, ": out is ",
          name_of(out.dtype()), " ", out.shape().str(), " and must be ", name_of(compute), " with ", e.batch,
          " sequences of rows of ", width);
  require_vector(name, "lse", lse, e.batch * e.heads * e.seq, compute);
  return e;
}

namespace {

/// Checks where the sums of a product go, and what is applied to them on the way.
void check_what_follows(const Matmul& args, const MatmulExtents& e, DType operands) {
  const Tensor& c = args.c;
  if (c.shape().rank() < 1 || rows_of(c) != e.m || c.shape().back() != e.n) [[unlikely]]
    fail(ErrorKind::usage, "matmul: c is ", c.shape().str(), " and must hold ", e.m, " rows of ", e.n);
  if (args.bias)
    require(args.bias.numel() == e.n && args.bias.dtype() == operands, "matmul: bias is ",
            name_of(args.bias.dtype()), " ", args.bias.shape().str(), " and must be ", name_of(operands),
            " [", e.n, "]");
  require(args.activation == Activation::none || !args.accumulate,
          "matmul: an activation cannot follow accumulate");
  if (args.fold)
    require(c.dtype() != DType::f64 && !args.bias && !args.pre_activation &&
                args.activation == Activation::none && is_floating(*args.fold) && *args.fold != DType::f64,
            "matmul: only a product alone can be folded, rounded to fp32, bf16 or fp16, and none of fp64");
  if (args.pre_activation)
    require(args.pre_activation.numel() == e.m * e.n && args.pre_activation.dtype() == c.dtype(),
            "matmul: pre_activation is ", name_of(args.pre_activation.dtype()), " ",
            args.pre_activation.shape().str(), " and must match c, ", name_of(c.dtype()), " ",
            c.shape().str());
}

/// Whether one product takes operands of these blocks, as cuBLASLt has it.
bool multiply_together(Fp8Scaling a, Fp8Scaling b) {
  const auto in_blocks = [](Fp8Scaling s) {
    return s == Fp8Scaling::blocks_1x128 || s == Fp8Scaling::blocks_128x128;
  };
  if (!in_blocks(a) || !in_blocks(b)) return a == b;
  return a == Fp8Scaling::blocks_1x128 || b == Fp8Scaling::blocks_1x128;
}

MatmulExtents check_fp8_matmul(const Matmul& args) {
  const Fp8Matrix &a = args.fp8_a, &b = args.fp8_b;
  require(!args.a && !args.b && !args.trans_a && !args.trans_b && !args.few_rows && args.c,
          "matmul: operands in FP8 come alone, as rows of what is summed");
  check_fp8("matmul", a), check_fp8("matmul", b);
  require(a.cols == b.cols, "matmul: rows of a, ", a.cols, ", and of b, ", b.cols, ", differ");
  require(a.rule.format == Fp8Format::e4m3 || b.rule.format == Fp8Format::e4m3,
          "matmul: one of two operands in FP8 must be E4M3");
  require(multiply_together(a.rule.scaling, b.rule.scaling),
          "matmul: two operands in FP8 have one scale a tensor each, or one a row, or blocks of 1 x 128, of "
          "which one's may be 128 x 128");
  require(args.c.dtype() == DType::bf16 || args.c.dtype() == DType::f32, "matmul: c is ",
          name_of(args.c.dtype()), " and must be bf16 or fp32");
  const MatmulExtents e{.m = a.rows, .n = b.rows, .k = a.cols};
  check_what_follows(args, e, DType::bf16);
  return e;
}

void check_few_rows(const Matmul& args) {
  require(args.trans_b && !args.trans_a && !args.accumulate && !args.fold && args.c.dtype() == args.a.dtype(),
          "matmul: few rows are multiplied by a transposed b, into their own dtype, and not added");
}

MatmulExtents check_stored_matmul(const Matmul& args) {
  const StoredMatrix& b = args.stored_b;
  require(args.a && args.c && !args.b && args.few_rows, "matmul: few rows alone are multiplied by blocks");
  require(is_floating(args.a.dtype()) && args.a.dtype() != DType::f64, "matmul: a is ",
          name_of(args.a.dtype()), "; values of blocks are made in fp32, bf16 or fp16");
  require(b.blocks.dtype() == DType::u8 && b.blocks.numel() == stored_bytes(b.format, b.rows * b.cols),
          "matmul: ", b.blocks.shape().str(), " bytes are not the ", name_of(b.format), " blocks of ", b.rows,
          " rows of ", b.cols);
  require(args.a.shape().back() == b.cols, "matmul: a is ", args.a.shape().str(), " and rows of b have ",
          b.cols, " elements");
  const MatmulExtents e{.m = rows_of(args.a), .n = b.rows, .k = b.cols};
  check_what_follows(args, e, args.a.dtype());
  check_few_rows(args);
  return e;
}

}  // namespace

MatmulExtents check_matmul(const Matmul& args) {
  if (args.fp8_a || args.fp8_b) return check_fp8_matmul(args);
  if (args.stored_b) return check_stored_matmul(args);
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
  // Texts of shapes are made for errors alone: products of a few rows take hardly longer.
  if (k != e.k) [[unlikely]]
    fail(ErrorKind::usage, "matmul: a is ", a.shape().str(), args.trans_a ? " transposed" : "", " and b ",
         b.shape().str(), args.trans_b ? " transposed" : "", ": the inner extents ", e.k, " and ", k,
         " differ");
  check_what_follows(args, e, a.dtype());
  if (args.few_rows) check_few_rows(args);
  return e;
}

}  // namespace sherd::tensor
