#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/choices.h"
#include "base/random.h"
#include "tensor/arrays.h"
#include "tensor/exact_sum.h"
#include "tensor/formats/fp8.h"
#include "tensor/glu.h"
#include "tensor/rotary.h"
#include "tensor/routing.h"
#include "tensor/tensor.h"

namespace sherd::tensor {

enum class Activation : std::uint8_t {
  none,
  gelu_tanh,  ///< 0.5·x·(1 + tanh(√(2/π)(x + 0.044715·x³))); GPT-2's
  gelu_erf,   ///< x·Φ(x)
  sigmoid,    ///< 1/(1 + e^-x)
  exp,        ///< e^x
  log         ///< the natural logarithm; NaN below 0
};

/// A matrix in few bits: uint8, the blocks of its elements row by row (tensor/formats/stored_format.h).
struct StoredMatrix {
  Tensor blocks{};
  StoredFormat format = StoredFormat::compute;
  std::int64_t rows = 0, cols = 0;
  explicit operator bool() const { return blocks.defined(); }
};

/// c[m,n] = act(op(a)·op(b) + bias), or c += op(a)·op(b) when `accumulate`. The activation applies to the sum
/// after it was rounded to c's dtype, so that act(pre_activation) made again later has the same bits.
///
/// a: [m,k] or, with trans_a, [k,m]; b: [k,n] or, with trans_b, [n,k]. Leading extents are folded into rows.
/// a and b share one floating dtype; c may be that dtype or fp32. Sums run in fp32 (fp64 for fp64) and round
/// once.
///
/// Or both are in FP8, in place of a and b: c = act(fp8_a·fp8_bᵀ + bias), for c of bf16 or fp32; what follows
/// the sum is as for operands in bf16. On processors the product's bits are those of what the codes stand for
/// in bf16. A GPU needs compute capability 9.0 (8.9 for one scale a tensor); elsewhere Error{config}.
struct Matmul {
  Tensor a{}, b{}, c{};
  bool trans_a = false, trans_b = false;
  bool accumulate = false;
  std::optional<DType> fold{};  ///< set: c gets what Kernels::fold() of the product, in c's dtype, would give
  Tensor bias{};                ///< optional [n], dtype of a; not with fold
  Activation activation = Activation::none;  ///< not with accumulate
  Tensor pre_activation{};  ///< optional [m,n], dtype of c: receives the value before the activation
  /// The rows of a are few, and each is multiplied by itself: b is read once, at memory's speed, and a row's
  /// bits do not depend on how many there are. They may differ from those without, in the last places. With
  /// trans_b, into c of a's dtype, alone; only processors make use of it.
  bool few_rows = false;
  Fp8Matrix fp8_a{}, fp8_b{};  ///< [m,k] and [n,k]; without trans_a, trans_b and few_rows
  /// In place of b, [n,k], with few_rows: the product has the bits that dequantize() of it gives, and only
  /// some of its rows are made at a time. Where Kernels::multiplies_stored().
  StoredMatrix stored_b{};
};

/// The logical positions of the rows of a tensor [batch.., rows, width] that holds a part of a sequence: up
/// to two ranges, one after the other, as a context-parallel rank has them. By default the rows are the
/// sequence.
struct Positions {
  std::int64_t first = 0;   ///< position of row 0
  std::int64_t count = 0;   ///< rows from `first` on; 0: all
  std::int64_t second = 0;  ///< position of row `count`
  constexpr std::int64_t at(std::int64_t row) const {
    return count == 0 || row < count ? first + row : second + row - count;
  }
  /// One more than the highest position of so many rows; 0 of none.
  constexpr std::int64_t end(std::int64_t rows) const {
    if (rows == 0) return 0;
    if (count == 0 || rows <= count) return first + rows;
    const std::int64_t a = first + count, b = second + rows - count;
    return a > b ? a : b;
  }
  bool operator==(const Positions&) const = default;
};

/// The part of a vocabulary whose rows, or columns, a rank holds: ids [first, first + those of the tensor).
struct VocabSlice {
  std::int64_t first = 0;
  std::int64_t ids = 0;  ///< the whole vocabulary's; ids from here on are padding. 0: up to the tensor's end
};

/// Elements of a random stream: the element of a tensor with flat index i draws element first + i.
struct RandomElements {
  RandomKey key;
  std::uint64_t first = 0;
  RandomElements(RandomKey stream, std::uint64_t first_element = 0)  // NOLINT(google-explicit-constructor)
      : key(stream), first(first_element) {}
};

/// Rows of `columns` elements within a tensor: row i begins at flat element first + i·stride.
struct StridedRows {
  Tensor tensor;
  std::int64_t first = 0, stride = 0;
};

/// Where a call of attention lies in a larger one, for masks and for the numbers by which dropout knows
/// scores: of `heads` query heads and `seq` keys and queries in all, the call's heads begin with `head`, its
/// queries at position `query`, its keys at `key`. 0 heads or seq: those of the call.
struct ScoreIndex {
  std::int64_t heads = 0, seq = 0;
  std::int64_t head = 0, query = 0, key = 0;
};

/// Where documents begin and end among all rows of a call's sequences, which lie behind each other: n + 1
/// numbers for n documents, from 0 to the number of rows (cu_seqlens of variable-length attention). None goes
/// from one sequence into the next.
using Documents = std::vector<std::int64_t>;

/// Geometry of self-attention over packed projections.
///
/// qkv: [batch, seq, (heads + 2·kv_heads)·head_dim], grouped per key-value head: for group g the columns are
/// r = heads/kv_heads query heads, then the key head, then the value head (Megatron's order). out: [batch,
/// seq, heads·head_dim].
struct Attention {
  int heads = 1, kv_heads = 1;
  bool causal = true;  ///< query i sees keys j <= i alone, both counted as in `scores`
  /// > 0: and of these only near ones, i - window < j (`sliding_window` in Hugging Face's configurations),
  /// without causal also j < i + window. One that hides no key of the call changes nothing.
  std::int64_t window = 0;
  double scale = 0;           ///< multiplies q·k; 0 means 1/√head_dim
  float cap = 0;              ///< > 0: a scaled score s becomes cap·tanh(s/cap) (Gemma 2)
  float dropout = 0;          ///< probability of zeroing a normalised score
  RandomKey key{};            ///< stream of the dropout mask: element ((b·heads + h)·seq + i)·seq + j
  ScoreIndex scores{};        ///< with which b, h, i and j count, where this is a part of a larger attention
  Positions positions{};      ///< the rows' positions, for rotary()
  bool lengths_vary = false;  ///< from call to call: a library is not to prepare for this one
  /// Set: queries see keys of their own document alone. Dropout then draws for sequence b what it would draw
  /// for it alone with key.at(b).
  std::shared_ptr<const Documents> documents{};
  /// For rotary(), in place of `positions`: int32, of each row of the call its position, below the rows of a
  /// sequence; undefined: as these say.
  Tensor row_positions{};
  std::int64_t head_dim(std::int64_t width) const { return width / (heads + 2 * kv_heads); }
};

/// Keys and values of one layer, of texts that are being generated. Token p of a text lies in row p mod
/// capacity.
struct KeyStore {
  /// [texts, kv_heads, capacity, head_dim], in the dtype of qkv. Undefined values (processors alone): the
  /// keys are the values too.
  Tensor keys, values;
  /// int32 [batch, 3]: of each sequence of the call the text that it continues, the position of its first row
  /// there, and how many of its rows count. No text twice.
  Tensor places;
};

/// Geometry of the gated delta rule (Yang et al. 2025, "Gated delta networks", arXiv 2412.06464), the linear
/// attention of Qwen3-Next: each value head has a state S [key_dim, value_dim], which a row t with query q,
/// key k and value v of its head changes, and then reads:
///
///     S ← exp(g[t])·S;  S ← S + k·(beta[t]·(v − kᵀS))ᵀ;  out[t] = qᵀS
///
/// q and k are divided by √(Σ of their squares + epsilon) before, q also by √key_dim. A state begins at zero
/// with each sequence, and with each document.
///
/// Packed rows: [batch, rows, key_heads·(2·key_dim + r·value_dim)], r = value_heads/key_heads: of each key
/// head its query, its key, and the values of r value heads.
struct DeltaRule {
  int key_heads = 1, value_heads = 1;
  std::int64_t key_dim = 1;
  double epsilon = 1e-6;
  std::shared_ptr<const Documents> documents{};
  int repeats() const { return value_heads / key_heads; }
  std::int64_t value_dim(std::int64_t width) const { return (width / key_heads - 2 * key_dim) / repeats(); }
};

/// The states that one layer keeps of texts that are being generated, beside keys and values: one for each
/// text.
struct StateStore {
  Tensor states;  ///< [texts, …], as the kernel says
  Tensor places;  ///< KeyStore's; a text whose first row has position 0 begins with a state of zeros
};

/// Calls of attention, of both directions, by whose kernels they ran.
struct AttentionRoutes {
  std::uint64_t by_library = 0;  ///< cuDNN's
  std::uint64_t by_own = 0;
};

/// The compute kernels of one device, each declared here and listed in tensor/kernel_list.h. Stateless but
/// for caches; one object per rank, called from that rank's thread. All tensors are contiguous. Unless said
/// otherwise floating dtypes fp32, bf16, fp16 and fp64 are taken, sums run in fp32 (fp64 for fp64), and a
/// result rounds once to its tensor's dtype. Shapes are checked; a mismatch throws Error{usage} naming the
/// kernel. `accumulate` adds to the destination instead of overwriting it: the sum is formed in the compute
/// type and rounded once. An elementwise output may be one of its inputs. Gradients of parameters (sum_rows'
/// out, dweight, dbias, dtable) may be fp32 where the inputs are narrower.
class Kernels {
 public:
  virtual ~Kernels() = default;
  virtual Device& device() = 0;

  // ---- data movement ----
  virtual void fill(const Tensor& x, double value) = 0;
  /// Equal numel; converts between dtypes (also integers of one width).
  virtual void copy(const Tensor& from, const Tensor& to) = 0;

  /// to (+)= from, for `rows` rows of `columns` elements each; converts between floating dtypes, rounding
  /// once. Integers are copied to their own dtype. The two must not overlap, nor rows of `to` each other.
  virtual void copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows,
                         std::int64_t columns, bool accumulate = false) = 0;
  /// to (+)= from·factor[0]; factor: [1], fp32 or fp64. Equal numel; converts between floating dtypes,
  /// rounding once.
  virtual void add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool accumulate) = 0;
  /// out[0] = factor·a[0]/b[0], 0 where b[0] is 0, for fp32 and fp64 tensors of one element each.
  virtual void quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) = 0;

  /// to = the array that lies in `from` at `strides`, of to's shape and dtype; any dtype.
  virtual void copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) = 0;

  // ---- dense products ----
  virtual void matmul(const Matmul& args) = 0;
  /// out[n] (+)= sum over rows of x[m,n]
  virtual void sum_rows(const Tensor& x, const Tensor& out, bool accumulate) = 0;

  // ---- folds along an axis ----
  /// out[o][i] (+)= factor·Σ_k x[o][k][i], in one order for a shape. out: any dtype with x's compute type.
  virtual void sum_axis(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out,
                        bool accumulate) = 0;
  /// out[o][i] = the largest x[o][k][i]; a NaN if one is. out: x's dtype.
  virtual void max_axis(const Tensor& x, const AxisExtents& axis, const Tensor& out) = 0;
  /// dx = dy at the first k that has the value y, max_axis() of x; 0 elsewhere.
  virtual void max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy, const AxisExtents& axis,
                                 const Tensor& dx) = 0;
  /// y = softmax(scale·x) over the last extent, or its logarithm, of the columns that a row sees; 0 in the
  /// others, and where it sees none above -infinity. x: y's dtype or its compute type; y may be x.
  virtual void softmax(const Tensor& x, const Softmax& args, const Tensor& y) = 0;
  /// dx, of y's dtype, from y. dy: y's dtype or its compute type; dx may be y or dy.
  virtual void softmax_backward(const Tensor& y, const Tensor& dy, const Softmax& args, const Tensor& dx) = 0;

  // ---- elementwise ----
  // Either of two operands may be smaller than out, and repeats as NumPy has it (broadcast_strides()); such a
  // one is not to be out.
  virtual void add(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  virtual void subtract(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  virtual void multiply(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  virtual void divide(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  /// out = x·factor
  virtual void scale(const Tensor& x, double factor, const Tensor& out) = 0;
  /// x = 0 where `weight` is −0, that is pruned (formats/pruned.h). As many elements; any floating dtypes.
  virtual void zero_pruned(const Tensor& weight, const Tensor& x) = 0;
  virtual void activation(Activation kind, const Tensor& x, const Tensor& out) = 0;
  /// dx = dy·act'(x); dx may be dy
  virtual void activation_backward(Activation kind, const Tensor& x, const Tensor& dy, const Tensor& dx) = 0;
  virtual void tanh(const Tensor& x, const Tensor& out) = 0;
  virtual void tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) = 0;
  virtual void relu(const Tensor& x, const Tensor& out) = 0;
  virtual void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) = 0;
  /// x: [rows, 2f] = [gate | up]; out[rows, f] = act(gate)·up
  virtual void glu(Glu kind, const Tensor& x, const Tensor& out) = 0;
  virtual void glu_backward(Glu kind, const Tensor& x, const Tensor& dy, const Tensor& dx) = 0;
  /// out = residual + keep(x)/(1-p); element i is kept when uniform_at(key, first + i) >= p. `residual` may
  /// be undefined (0).
  virtual void dropout(const Tensor& x, const Tensor& residual, float p, RandomElements random,
                       const Tensor& out) = 0;
  /// dx = keep(dy)/(1-p) with the same mask
  virtual void dropout_backward(const Tensor& dy, float p, RandomElements random, const Tensor& dx) = 0;

  // ---- normalisation over the last extent ----
  /// mean, rstd: [rows] in the compute type (fp32, or fp64 for fp64)
  virtual void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                          const Tensor& y, const Tensor& mean, const Tensor& rstd) = 0;
  /// Any of dx, dweight, dbias may be undefined. `accumulate` concerns dweight and dbias. With `onto_dx` the
  /// gradient is rounded and added to what dx holds: the bits of writing it elsewhere and of add() to dx.
  virtual void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                                   const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                                   const Tensor& dweight, const Tensor& dbias, bool accumulate,
                                   bool onto_dx = false) = 0;
  /// The gain is weight + shift, added in the compute type.
  virtual void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                        const Tensor& rstd, double shift = 0) = 0;
  virtual void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                                 const Tensor& dx, const Tensor& dweight, bool accumulate,
                                 bool onto_dx = false, double shift = 0) = 0;

  // ---- embeddings and positions ----
  /// ids: int32 [rows]; table: [vocab, width], whose row 0 is that of id slice.first; out: [rows, width]. Ids
  /// of the vocabulary that the table does not hold give zeros; one outside the vocabulary throws
  /// Error{data}. The table may be int32: other ids for these.
  virtual void embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                         const VocabSlice& slice = {}) = 0;
  /// dtable[ids[i] - slice.first] += dy[i] in index order, so that the sum has one order; ids that the table
  /// does not hold are left out. `accumulate` false zeroes dtable first. With `fold` dtable gets what
  /// fold() of the gradient, in its dtype, would give; rows that no id names stay what they are.
  virtual void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable, bool accumulate,
                                  const VocabSlice& slice = {}, std::optional<DType> fold = {}) = 0;
  /// out[b,s,:] = x[b,s,:] + table[positions.at(s),:]
  virtual void add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                             const Positions& positions = {}) = 0;
  /// dtable[positions.at(s),:] (+)= sum over b of dy[b,s,:]; other rows are zeroed when not accumulating
  virtual void add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                                      const Positions& positions = {}) = 0;
  /// Rotates the first d = rotary_size() elements of the query and key heads of packed qkv (Attention's
  /// layout), half-split pairing (i, i + d/2) as in Llama/NeoX, by position·rotary_frequencies()[i] of
  /// geometry.positions, and multiplies them by attention_scale(); the others pass. `transposed` rotates back
  /// and multiplies (the gradient). out may be qkv.
  virtual void rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool transposed,
                      const Tensor& out) = 0;

  // ---- attention ----
  /// lse: [batch, heads, seq] log-sum-exp of the scaled scores, compute type. Never forms a seq×seq matrix
  /// and skips blocks that no query sees (FlashAttention, Dao et al. 2022). A query that sees no key of the
  /// call gets zeros, a log-sum-exp of -inf, and gradients of zero.
  virtual void attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                         const Tensor& lse) = 0;
  virtual void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                  const Tensor& lse, const Tensor& dout, const Tensor& dqkv) = 0;
  /// Calls of the two so far, where a device has more than one way; else zeros.
  virtual AttentionRoutes attention_routes() const { return {}; }

  /// Sinks: keys beside those of a text, one for each head, which all its queries see with the score sinks[h]
  /// and whose value is zero (GPT-OSS; Xiao et al. 2023, "Efficient streaming language models with attention
  /// sinks"). out and lse, what attention() made of all other keys, become those with them, and then give
  /// attention_backward() the gradient with them. sinks: [heads].
  virtual void attention_sinks(const Tensor& sinks, const Tensor& out, const Tensor& lse) = 0;
  /// dsinks[h] (+)= -Σ over sequences and queries of exp(sinks[h] - lse)·(dout·out), of out and lse with
  /// sinks.
  virtual void attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                        const Tensor& dout, const Tensor& dsinks, bool accumulate) = 0;

  /// Causal attention of rows that continue texts: stores their keys and values, and with `out` defined lets
  /// each row see those of its text up to itself, the last `window` of them where there is one, row after row
  /// (so a capacity of `window` is enough; without a window it must hold all positions), and the sinks where
  /// they are defined. out: [batch, rows, heads·head_dim], zeros in rows that do not count. Neither dropout
  /// nor geometry.scores or documents are looked at.
  virtual void attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                             const Tensor& sinks, const Tensor& out) = 0;

  /// Takes another part of the keys into an attention: out [batch, seq, heads·head_dim] and lse [batch,
  /// heads, seq], both in the compute type, become those of all keys so far. part and part_lse are what
  /// attention() gave for rows [first, first + those of part) of every sequence. `begin`: there was nothing
  /// before; those rows are set. A log-sum-exp of -inf stands for no keys, whose part is not looked at.
  virtual void merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                               const Tensor& out, const Tensor& lse) = 0;

  // ---- linear attention ----
  /// Rows between two states that delta_rule() keeps for backward.
  static constexpr std::int64_t delta_block = 64;
  /// qkv: as DeltaRule says. gates: [batch, rows, 2·value_heads] in the compute type, of all heads beta, then
  /// g
  /// <= 0. out: [batch, rows, value_heads·value_dim]. states, where it is defined, receives the states before
  /// rows 0, delta_block, …: [batch, value_heads, blocks, key_dim, value_dim] in the compute type. With a
  /// `store` rows continue texts whose states [texts, value_heads, key_dim, value_dim], in the compute type,
  /// it has and receives; rows that do not count are zeros, and documents are not looked at.
  virtual void delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                          const StateStore& store, const Tensor& states, const Tensor& out) = 0;
  /// The gradients of a call without a store.
  virtual void delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                   const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                   const Tensor& dgates) = 0;
  /// beta = sigmoid(b), g = −exp(a_log)·log(1 + exp(a + dt_bias)) (Mamba 2's steps). x: [rows,
  /// 2·value_heads], of each of key_heads its value heads' b, then their a; a_log, dt_bias: [value_heads];
  /// gates: as delta_rule() takes them.
  virtual void delta_gates(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias, int key_heads,
                           const Tensor& gates) = 0;
  /// parts: [2, rows, value_heads] in the compute type, whose sums over rows are the gradients of a_log and
  /// of dt_bias.
  virtual void delta_gates_backward(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                                    int key_heads, const Tensor& dgates, const Tensor& dx,
                                    const Tensor& parts) = 0;
  /// Each column's convolution with its `taps` last rows: out[t, c] = silu(Σ_j weight[c, j]·x[t − taps + 1 +
  /// j, c]), with zeros before a sequence or a document. x, out: [batch, rows, columns]; weight: [columns,
  /// taps], of at most 8 taps. With a `store` rows continue texts, whose last taps − 1 rows of x [texts, taps
  /// − 1, columns], in the dtype of x, it has and receives; rows that do not count give anything.
  virtual void short_conv(const Tensor& x, const Tensor& weight,
                          const std::shared_ptr<const Documents>& documents, const StateStore& store,
                          const Tensor& out) = 0;
  /// The gradients of a call without a store. dx or dweight may be undefined.
  virtual void short_conv_backward(const Tensor& x, const Tensor& weight,
                                   const std::shared_ptr<const Documents>& documents, const Tensor& dout,
                                   const Tensor& dx, const Tensor& dweight, bool accumulate) = 0;

  // ---- experts ----
  /// logits: [tokens, experts], fp32 or fp64, as are bias, weights and scores. bias: [experts] or undefined.
  /// scores: [tokens, experts], the softmax over all experts or sigmoids; chosen: int32 [tokens, top_k], the
  /// most preferred first; weights: [tokens, top_k]. A NaN is chosen last.
  virtual void route(const Tensor& logits, const Tensor& bias, const Routing& routing, const Tensor& scores,
                     const Tensor& chosen, const Tensor& weights) = 0;
  /// dlogits: [tokens, experts], from the gradient of the weights (undefined: 0), and what auxiliary losses
  /// add: of Σ over tokens of balance·P, P the softmax or sigmoids over their sum, and of squared
  /// log-sum-exps.
  virtual void route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                              const Tensor& chosen, const Tensor& dweights, const RouterLossGradients& losses,
                              const Tensor& dlogits) = 0;
  /// out[t] = Σ_j weights[t, j]·rows[places[t, j]], in order of j, without those whose place is -1. rows: [n,
  /// width]; places: int32 [tokens, top_k], no two alike; weights: in the compute type.
  virtual void combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                            const Tensor& out) = 0;
  /// drows[places[t, j]] = weights[t, j]·dout[t]; dweights[t, j] = dout[t]·rows[places[t, j]], 0 for -1.
  /// Either may be undefined. Rows of drows that no place names stay what they are.
  virtual void combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                     const Tensor& dout, const Tensor& drows, const Tensor& dweights) = 0;

  // ---- losses ----
  // The cross-entropy of targets != ignore_index, -log softmax(logits)[target], over a vocabulary that ranks
  // may share (Shoeybi et al. 2019, "Megatron-LM"): each finds what its columns give, all add up what all
  // found, and each makes its columns' gradient. One rank with all columns is a group of one.

  /// The part of this rank's columns. logits: [rows, n], the columns of ids [slice.first, slice.first + n),
  /// of which those from slice.ids on are padding and take no part; targets: int32 [rows], ids of the whole
  /// vocabulary; lse, picked, most: [rows] in the compute type. lse[i] = log Σ_j exp(logits[i,j]), the least
  /// finite value where no column takes part; picked[i] = the target's logit, 0 where another rank has it;
  /// most, where defined: the row's largest logit, the least finite value where no column takes part. All are
  /// 0 in rows that do not count. A target outside the vocabulary throws Error{data}.
  virtual void cross_entropy(const Tensor& logits, const Tensor& targets, const VocabSlice& slice,
                             std::int32_t ignore_index, const Tensor& lse, const Tensor& picked,
                             const Tensor& most) = 0;
  /// All parts of the vocabulary together. lse, picked: [parts, rows]; lse_all: [rows], which may
  /// be the first part's; total: fp64 [2], (+)= {sum of -log softmax, number of targets that count}. Parts
  /// and rows are taken in order, so that all ranks get the same bits.
  virtual void cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                                   std::int32_t ignore_index, const Tensor& lse_all, const Tensor& total,
                                   bool accumulate) = 0;
  /// Overwrites logits with factor[0]·(softmax - onehot), given the log-sum-exp over all parts; padding and
  /// rows that do not count with 0. factor: [1], fp32 or fp64.
  virtual void cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                      const VocabSlice& slice, std::int32_t ignore_index,
                                      const Tensor& factor) = 0;
  /// loss[1] = mean((x - y)²), in the compute type like dloss
  virtual void mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) = 0;
  virtual void mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                           const Tensor& dx) = 0;

  /// total: fp64 [2] = {Σ w·l, Σ w} for l = max(x, 0) - x·t + log(1 + e^-|x|), the cross-entropy of
  /// sigmoid(x) with a target t of [0, 1]. targets, and weights unless undefined (1), are as logits.
  virtual void binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                    const Tensor& total) = 0;
  /// dx = factor[0]·w·(sigmoid(x) - t); factor: [1], fp32 or fp64.
  virtual void binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets,
                                             const Tensor& weights, const Tensor& factor,
                                             const Tensor& dx) = 0;

  // ---- FP8 (tensor/formats/fp8.h) ----
  /// Throws Error{config} where the device has no products of operands as `recipe` makes them: to be asked
  /// before a run begins. A meta device does not know for which GPU it stands.
  virtual void require_fp8(const Fp8Recipe& recipe) const { static_cast<void>(recipe); }
  /// to = x, or xᵀ where `transposed`, in FP8. x: fp32, bf16 or fp16, its leading extents folded into rows.
  /// lost: int64 [2], or undefined; adds the number of elements that are not finite, and that of those that
  /// became zero and were not.
  virtual void to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) = 0;
  // Parts of matrices that ranks share, with one scale a tensor or in blocks of 128 x 128. `values`, or
  // `codes` (uint8): as many elements as the range has.
  /// scales = the larger of these and the largest finite magnitude of the range's elements in each block.
  virtual void fp8_largest(const Tensor& values, const Fp8Range& range, Fp8Rule rule,
                           const Tensor& scales) = 0;
  /// Turns the largest magnitude of each block into its scale.
  virtual void fp8_scales(Fp8Format format, const Tensor& scales) = 0;
  virtual void fp8_encode(const Tensor& values, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                          const Tensor& codes) = 0;
  virtual void fp8_decode(const Tensor& codes, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                          const Tensor& values) = 0;

  // ---- what sharding and optimizers need ----
  /// out = the values of `blocks`, uint8 as tensor/formats/stored_format.h lays them out, rounded once. out:
  /// fp32, bf16 or fp16, as many elements as the blocks have.
  virtual void dequantize(StoredFormat format, const Tensor& blocks, const Tensor& out) = 0;
  /// to (+)= `from` rounded to `rounding`: what one rank gives to a sum of gradients. The value, or the sum
  /// in the compute type, rounds once to to's dtype. `from` may be fp32 where `to` is narrower, and the
  /// reverse.
  virtual void fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) = 0;
  /// Whether matmul() and embedding_backward() fold, which spares the way of a gradient through memory.
  virtual bool folds_gradients() const { return false; }
  /// Whether matmul() takes Matmul::stored_b, which spares the way of a weight's values through memory.
  virtual bool multiplies_stored() const { return false; }
  /// Adds the squares of all elements of all these to `sum`: blocks of 64 elements, counted from each
  /// tensor's start, are summed in double in a fixed order, the blocks exactly, so the total does not depend
  /// on how a tensor was cut at multiples of 64. A NaN or infinity sets sum.non_finite. Waits for the device
  /// once.
  virtual void sums_of_squares(std::span<const Tensor> all, ExactSum& sum) = 0;
  void sum_of_squares(const Tensor& x, ExactSum& sum) { sums_of_squares(std::span(&x, 1), sum); }
  /// x[i] = mean + std·normal_at(key, first + i): initial values by global index, whatever the sharding.
  virtual void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) = 0;
  virtual void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) = 0;
};

/// The accuracy that kernels of a CUDA device may trade for speed; the defaults keep every result repeatable
/// and as accurate as elsewhere.
struct CudaOptions {
  bool tf32 = false;        ///< fp32 products may round their operands to TF32 (10 bits)
  bool fused_gelu = false;  ///< GELU (tanh) on the unrounded sum inside the product; see cuda/matmul.cpp
  bool deterministic_attention = true;  ///< cuDNN's backward pass without atomics
};

/// The kernels for `device`, which must outlive them; `options` are for GPUs, and for devices that stand for
/// one. Those of a meta device read and write no tensor, find every sum and norm to be zero, and charge the
/// workspace that kernels of the device for which it stands would hold.
std::unique_ptr<Kernels> make_kernels(Device& device, const CudaOptions& options = {});

}  // namespace sherd::tensor
