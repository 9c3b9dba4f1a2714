#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "autograd/tape.h"
#include "tensor/slice.h"

// The operations of forward passes, by sections; each section's sources are named beside it. Those of layers
// of experts are in autograd/experts.h. Each throws Error{usage} that names the operation and the shapes
// where they do not fit.
namespace sherd::autograd {

using tensor::Activation;

// ---- parts and axes (arrays.cpp) ----
// Negative axes count from the end.

/// The same elements under another shape of equal size; shares memory.
Var reshape(const Var& x, const Shape& shape);

/// Indices [begin, end) along an axis, copied.
Var slice(const Var& x, int axis, std::int64_t begin, std::int64_t end);
/// Values one behind the other along an axis, alike in their dtype and in all other extents; one at least.
Var concat(std::span<const Var> parts, int axis);
inline Var concat(std::initializer_list<Var> parts, int axis) {
  return concat(std::span(parts.begin(), parts.size()), axis);
}

/// x with its axes in another order: axis i of the result is axis axes[i] of x.
Var permute(const Var& x, const std::vector<int>& axes);
/// x with two of its axes exchanged.
Var transpose(const Var& x, int a, int b);

// ---- element by element (elementwise.cpp) ----

// Two operands, element by element, in one dtype. Where their shapes differ, one or both repeat as NumPy
// has it: axes are matched from the last one on, and extents of 1, or missing ones, repeat. Gradients of what
// repeats are summed in fp32 (fp64 for fp64) in an order that the shapes alone decide, and round once. Throws
// Error{usage} naming the operation and the shapes.
Var add(const Var& a, const Var& b);
Var subtract(const Var& a, const Var& b);
Var multiply(const Var& a, const Var& b);
Var divide(const Var& a, const Var& b);

/// x·factor
Var scale(const Var& x, double factor);

/// x in another floating dtype, rounded to nearest; x itself where it has that dtype. The gradient comes back
/// in x's dtype. Selective recompute makes it again from x.
Var cast(const Var& x, DType dtype);

/// act(x); kinds in tensor::Activation. Selective recompute makes it again from x.
Var activation(const Var& x, tensor::Activation kind);
/// GELU in its tanh approximation, as GPT-2 has it.
Var gelu(const Var& x);
Var sigmoid(const Var& x);
Var exp(const Var& x);
/// The natural logarithm: -infinity of 0, NaN below.
Var log(const Var& x);
Var tanh(const Var& x);
Var relu(const Var& x);
/// act(gate)·up for x = [gate | up] along the last extent (tensor::Glu). x: [..., 2f]; the result: [..., f].
/// Selective recompute makes it again from x.
Var glu(const Var& x, tensor::Glu kind = tensor::Glu::swiglu);

// ---- folds along an axis, or of all elements (folds.cpp) ----
// Sums are formed in fp32 or wider (fp64 for fp64), in an order that the shape alone decides, and round once.
// Negative axes count from the end. A result without its only axis has shape [1].

/// All elements: [1], in fp32 (fp64 for fp64), as losses are. Throws Error{usage} for a mean of none.
Var sum(const Var& x);
Var mean(const Var& x);

/// Along one axis, in x's dtype. `keep`: the axis stays, with one element.
Var sum(const Var& x, int axis, bool keep = false);
Var mean(const Var& x, int axis, bool keep = false);
/// The largest along an axis; a NaN where there is one. The gradient goes to the first that is largest.
Var max(const Var& x, int axis, bool keep = false);

/// e^x over its sum along an axis, and the logarithm of that. -infinity counts as nothing; where nothing is
/// left, softmax gives 0.
Var softmax(const Var& x, int axis = -1);
Var log_softmax(const Var& x, int axis = -1);

// ---- products (linear.cpp) ----

/// act(x·wᵀ + b). x: [..., in]; w: [out, in]; b: [out] or undefined; the result: [..., out].
///
/// With an activation the sum before it is kept for backward, and selective recompute makes the result again
/// from it. Weight gradients go straight into the parameters' gradient memory, in its dtype.
Var linear(const Var& x, const Var& w, const Var& b = {}, Activation activation = Activation::none);

/// op(a)·op(b), where op transposes when asked. a: [m,k] or [k,m]; b: [k,n] or [n,k]; the result: [m,n].
Var matmul(const Var& a, const Var& b, bool trans_a = false, bool trans_b = false);

// ---- parts of adapters of linear layers (low_rank.cpp; sharding/parallel/adapters/adapters.h) ----

/// Rows [from, from + count) of a matrix, which become rows [to, to + count) of another one, in the
/// `column`-th block of its columns.
struct SpreadRows {
  std::int64_t from, to, count;
  std::int64_t column;
};
/// A matrix made of another one's rows: it has `rows` rows, and `blocks` blocks of as many columns as the
/// other. Each row of the other goes to one place at most.
struct RowSpread {
  std::vector<SpreadRows> runs;
  std::int64_t rows = 0, blocks = 1;

  /// Whether the matrix is the other one itself.
  bool as_it_is() const { return rows == 0; }
};
/// The matrix that has these rows of x, and `elsewhere` in all other elements. x: [r, c]; the result: [rows,
/// blocks·c].
Var spread(const Var& x, const RowSpread& to, double elsewhere);

/// y + x·vᵀ, where v is w, spread out with zeros elsewhere. y: [..., out]; x: [..., in]; v: [out, in]; as
/// many rows in both. Takes y's memory, which nobody may read after: y is a value that a product or a sum has
/// just made. `sources`: of the rows, as of linear_by_source() (experts.h), for w's gradient; empty: one.
/// Where not `adds`, the product is left to another rank's part of a sum: y stays as it is, and gradients are
/// found.
Var linear_onto(const Var& y, const Var& x, const Var& w, const RowSpread& to = {},
                std::vector<std::int64_t> sources = {}, bool adds = true);

/// x times f, which holds a factor for each of the last extent's columns. x: [..., n]; f: [n].
Var scale_columns(const Var& x, const Var& f);

// ---- norms (norm.cpp, head_norm.cpp) ----

/// (x - mean)/√(variance + eps)·weight + bias over the last extent (Ba et al. 2016). x: [..., h]; weight,
/// bias: [h]. Row statistics are kept for backward; selective recompute makes the result again from x.
Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps = 1e-5);  // bias may be undefined
/// x/√(mean(x²) + eps)·(weight + shift) over the last extent (Zhang and Sennrich 2019; with a shift of 1
/// Gemma's). Kept and made again likewise.
Var rms_norm(const Var& x, const Var& weight, double eps = 1e-5, double shift = 0);
/// rms_norm of each query head and each key head of packed qkv (tensor::Attention), with one gain for all
/// query heads and one for all key heads; values pass. qkv: [..., (heads + 2·kv_heads)·head_dim]; gains:
/// [head_dim] (Qwen3), or [heads·head_dim] and [kv_heads·head_dim], where a token's query heads have one norm
/// together, and its key heads (OLMo 2). Kept and made again likewise.
Var head_norm(const Var& qkv, const Var& query_gain, const Var& key_gain, const tensor::Attention& geometry,
              double eps = 1e-5, double shift = 0);

// ---- embeddings (embedding.cpp) ----

/// Rows of `table` by id. ids: int32 of any shape; table: [vocab, width]; the result: [ids..., width].
/// `slice`: the part of the vocabulary that the table holds; other ids give zeros, and their gradients are
/// left out. Throws Error{data} for an id outside the vocabulary.
Var embedding(const Tensor& ids, const Var& table, const tensor::VocabSlice& slice = {});
/// x[b, s, :] + table[positions.at(s), :]. x: [batch, seq, width]; table: [at least positions.end(seq),
/// width].
Var add_positions(const Var& x, const Var& table, const tensor::Positions& positions = {});

// ---- dropout (dropout.cpp) ----

/// Zeroes each element with probability p and scales the rest by 1/(1-p) (Srivastava et al. 2014). The mask
/// is a function of `key` and the element's index and is made again in backward, so nothing is kept. Gives x
/// itself when p is 0 or the tape is not training.
///
/// `elements`: which ones of a logical tensor x holds, whose mask they get; by default x is all of it. Throws
/// Error{usage} unless 0 <= p < 1 and the slice has as many elements as x.
Var dropout(const Var& x, float p, RandomKey key, const tensor::Slice& elements = {});
/// residual + dropout(x), in one pass.
Var dropout_add(const Var& x, const Var& residual, float p, RandomKey key,
                const tensor::Slice& elements = {});
/// Each element times a number drawn evenly from [1 − spread, 1 + spread], in x's dtype, likewise by `key`
/// and the element's index (Fedus et al. 2021, "Switch transformers"). Throws Error{usage} unless 0 <= spread
/// < 1.
Var jitter(const Var& x, double spread, RandomKey key, const tensor::Slice& elements = {});

// ---- attention (attention.cpp, cross_attention.cpp) ----

/// Rotary positions (Su et al. 2021) on the query and key heads of packed qkv; layout in tensor::Attention.
Var rotary(const Var& qkv, tensor::Attention geometry, const tensor::Rotary& angles = {});

/// Self-attention over packed projections; layout and options in tensor::Attention, whose key names the
/// dropout mask. Nothing is dropped out unless the tape is training. qkv: [batch, seq, (heads +
/// 2·kv_heads)·head_dim]; the result: [batch, seq, heads·head_dim]. Keeps qkv, the result and one number per
/// head and row; selective recompute makes the result again. With Tape::key_cache the rows continue texts,
/// and see the keys that these have there; it knows no documents. sinks: undefined, or [heads], what
/// tensor::Kernels::attention_sinks() takes.
Var attention(const Var& qkv, tensor::Attention geometry, const Var& sinks = {});

// ---- linear attention (linear_attention.cpp); with Tape::key_cache rows continue texts ----

/// Each column's convolution with its last rows, and silu of it (tensor::Kernels::short_conv). x: [batch,
/// rows, columns]; weight: [columns, taps]. Documents are the tape's.
Var short_conv(const Var& x, const Var& weight);
/// The gates of the gated delta rule: how much it writes and keeps, per value head
/// (tensor::Kernels::delta_gates). x: [..., 2·heads]; a_log, dt_bias: [heads]; the result: x's shape, fp32
/// (fp64 for fp64).
Var delta_gates(const Var& x, const Var& a_log, const Var& dt_bias, int key_heads);
/// The gated delta rule (tensor::DeltaRule, whose documents are the tape's). qkv: [batch, rows, width];
/// gates: [batch, rows, 2·value_heads]; the result: [batch, rows, value_heads·value_dim]. Keeps qkv, gates,
/// and a state per head and 64 rows; selective recompute makes the result and the states again.
Var delta_rule(const Var& qkv, const Var& gates, tensor::DeltaRule rule);

/// Which keys queries see, and how scores are scaled.
struct AttentionMask {
  bool causal = false;  ///< query i sees keys j <= i alone, both counted from the first
  float scale = 0;      ///< multiplies q·k; 0 means 1/√head_dim
  /// [batch, k_len], uint8: 0 hides a key (padding) from all queries of its row. Undefined: none is hidden.
  Tensor seen{};
  /// [heads, q_len + k_len − 1], fp32 (fp64 for fp64): element j − i + q_len − 1 of a head is added to the
  /// scaled score of query i and key j (relative positions). Undefined: nothing is. Each head then has a key
  /// of its own.
  Var distances{};
  /// Probability of zeroing a normalised score, where the tape is training; element ((b·heads + h)·q_len +
  /// i)·k_len + j of stream `key`, with heads counted from first_head of all_heads (0: q's).
  float dropout = 0;
  RandomKey key{};
  std::int64_t first_head = 0, all_heads = 0;
};

/// AttentionMask::seen for rows of which the first lengths[b] keys of `keys` are there and the others
/// padding. lengths: int32 [batch]; waits for the device. Throws Error{data} for a length that is none.
Tensor seen_by_length(Tape& tape, const Tensor& lengths, std::int64_t keys);

/// softmax(scale·q·kᵀ)·v over the keys that a query sees; 0 where it sees none. q: [batch, q_len, heads,
/// head_dim]; k: [batch, k_len, kv_heads, head_dim]; v: [batch, k_len, kv_heads, width]; the result: [batch,
/// q_len, heads, width], of one dtype. heads / kv_heads query heads in a row share a key head.
///
/// As many queries as keys, all of them seen, go through the kernels of packed self-attention, without
/// distances and dropout. Else scores are formed for one key head of one sequence at a time:
/// heads/kv_heads·q_len·k_len numbers in fp32, and once more in a dtype of 16 bits. Backward forms them
/// again; q, k and v are kept.
Var attention(const Var& q, const Var& k, const Var& v, const AttentionMask& mask = {});

// ---- losses (loss.cpp) ----

/// Mean over targets other than `ignore_index` of -log softmax(logits)[target]. logits: [..., vocab];
/// targets: int32, one per row; columns from `valid` on are padding and take no part (0: none). The loss:
/// [1], fp32 (fp64 for fp64). Throws Error{data} for a target outside the vocabulary.
///
/// Consumes the logits: backward turns their memory into their gradient, so that no second copy of the
/// largest tensor of a step exists. Whoever still holds them then (a Var kept by the caller, another
/// operation that saved them) keeps the values, at the price of that second copy.
Var cross_entropy(Var logits, const Tensor& targets, std::int64_t valid = 0,
                  std::int32_t ignore_index = -100);

/// The mean of -t·log(sigmoid(x)) - (1 - t)·log(1 - sigmoid(x)) over all logits x, formed without overflow,
/// for targets t of [0, 1]; [1], fp32 (fp64 for fp64). With `weights` it is Σ w·l / Σ w, 0 where they are all
/// 0 (unlike PyTorch's `weight`, whose mean divides by the number of elements). Targets and weights have the
/// logits' shape and take no gradient; dtypes may differ as in mean_squared_error().
Var binary_cross_entropy(const Var& logits, const Tensor& targets, const Tensor& weights = {});

/// mean((x - y)²), [1]; y takes no gradient. Where their dtypes differ (a prediction in bf16, a target in
/// fp32), both are compared in fp32 (fp64 for fp64 x), and x's gradient comes back in x's dtype.
Var mean_squared_error(const Var& x, const Tensor& y);

}  // namespace sherd::autograd
