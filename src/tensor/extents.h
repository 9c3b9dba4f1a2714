#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tensor/kernels.h"
#include "tensor/seen_keys.h"

// The extents that follow from arguments of rows, embeddings, losses, attention and products. The kernels of
// every device share these; each throws Error{usage} that names the kernel where arguments do not fit.

namespace sherd::tensor {

/// Row-wise normalisation: x [rows, width], the weight and bias that are defined [width], rstd [rows].
void check_norm(const char* kernel, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& rstd);
/// The tensors of its gradient; dx, dweight and dbias may be undefined.
void check_norm_backward(const char* kernel, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                         const Tensor& dy, const Tensor& dx, const Tensor& dweight, const Tensor& dbias);

/// ids: int32 [rows] against values: [rows, width] and table: [vocab, width]. Returns the width.
std::int64_t check_embedding(const char* kernel, const Tensor& ids, const Tensor& table,
                             const Tensor& values);
/// The part of a vocabulary that a tensor with rows, or columns, of `held` ids has. Returns the number of ids
/// in all of it.
std::int64_t check_vocab_slice(const char* kernel, std::int64_t held, const VocabSlice& slice);

/// Rows that follow each other and whose positions do.
struct PositionRange {
  std::int64_t row, position, count;
};
/// The positions of so many rows as ranges, none empty, in ascending order of positions.
std::vector<PositionRange> position_ranges(const char* kernel, const Positions& positions, std::int64_t rows);
/// values: [batch…, seq, width] against table: [most positions, width]. Returns the ranges of seq rows.
std::vector<PositionRange> check_positions(const char* kernel, const Tensor& values, const Tensor& table,
                                           const Positions& positions);
/// The sums of `from` fit the dtype of `to`.
void check_summable(const char* kernel, const Tensor& from, const Tensor& to);

/// add_positions_backward() by sum(range), which takes the rows of dy for a range of rows of dtable.
template <class Sum>
void sum_positions(Kernels& kernels, const Tensor& dy, const Tensor& dtable, bool accumulate,
                   const Positions& positions, const Sum& sum) {
  constexpr const char* name = "add_positions_backward";
  const std::vector<PositionRange> ranges = check_positions(name, dy, dtable, positions);
  check_summable(name, dy, dtable);
  std::int64_t at = 0;  // rows before it are done
  for (const PositionRange& range : ranges) {
    if (!accumulate) kernels.fill(dtable.rows(at, range.position), 0);
    sum(range);
    at = range.position + range.count;
  }
  if (!accumulate) kernels.fill(dtable.rows(at, dtable.shape()[0]), 0);
}

/// The arguments of copy_rows(), add_scaled(), zero_pruned() and quotient().
void check_copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows, std::int64_t columns,
                     bool accumulate);
void check_add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to);
void check_zero_pruned(const Tensor& weight, const Tensor& x);
void check_quotient(const Tensor& a, const Tensor& b, const Tensor& out);

/// The heads of packed projections, their size, and how many of their elements, the first ones, turn.
struct RotaryExtents {
  std::int64_t rows, seq, head, turned;
};
RotaryExtents check_rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary,
                           const Tensor& out);

/// Cosines and sines of positions·frequencies, times attention_scale() and query_scale(): [seq, half] in the
/// compute type.
struct RotaryAngles {
  std::int64_t seq = 0, half = 0;
  Rotary rotary;
  Tensor cosine, sine;
};

/// The tables of angles that were asked for last, as kinds of layers may have other positions each. One that
/// is too short is made anew, for twice as many positions at least: a text that grows token by token must not
/// make it anew each time.
class RotaryTables {
 public:
  /// The tables for queries and for keys, which are one where nothing is only the queries'. `write` fills one
  /// that was made.
  template <class Write>
  std::pair<RotaryAngles, RotaryAngles> of_both(Device& device, std::int64_t seq, std::int64_t half,
                                                const Rotary& rotary, DType compute, const Write& write) {
    Rotary keys = rotary;
    keys.query_beta = 0, keys.query_positions = 0;
    RotaryAngles queries = of(device, seq, half, rotary, compute, write);
    return {queries, keys == rotary ? queries : of(device, seq, half, keys, compute, write)};
  }

 private:
  template <class Write>
  RotaryAngles of(Device& device, std::int64_t seq, std::int64_t half, const Rotary& rotary, DType compute,
                  const Write& write) {
    const auto is_it = [&](const RotaryAngles& table) {
      return table.half == half && table.rotary == rotary && table.cosine.dtype() == compute;
    };
    const auto found = std::find_if(tables_.begin(), tables_.end(), is_it);
    if (found != tables_.end()) {
      if (found->seq >= seq) return *found;
      seq = std::max(seq, 2 * found->seq);
      tables_.erase(found);
    }
    if (tables_.size() == most) tables_.erase(tables_.begin());
    const auto empty = [&] {
      return Tensor::empty(device, {seq, half}, compute, device::Category::workspace);
    };
    tables_.push_back({seq, half, rotary, empty(), empty()});
    write(tables_.back());
    return tables_.back();
  }

  static constexpr std::size_t most = 4;
  std::vector<RotaryAngles> tables_;  ///< in the order in which they were made
};

/// Logits of `rows` rows of `columns`, for the ids from `first` on of `ids`; the first `valid` columns take
/// part.
struct LossExtents {
  std::int64_t rows = 0, columns = 0, valid = 0;
  std::int64_t first = 0, ids = 0;
};
/// The arguments that both directions of the loss share.
LossExtents check_cross_entropy(const char* kernel, const Tensor& logits, const Tensor& targets,
                                const Tensor& lse, const VocabSlice& slice);
/// The arguments of cross_entropy_total(). Returns the number of parts.
std::int64_t check_cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                                       const Tensor& lse_all, const Tensor& total);

/// The keys that the queries of a call with `seq` rows see. Throws Error{usage} for a window below 0.
SeenKeys seen_keys(const char* kernel, const Attention& geometry, std::int64_t seq);

struct AttentionExtents {
  std::int64_t batch = 0, seq = 0, dim = 0;
  std::int64_t heads = 0, kv_heads = 0;
  double scale = 0;
  double cap = 0;  ///< of scores; 0: none
  SeenKeys seen{};
  /// Extents of the whole attention, whose scores dropout numbers; the number of the call's first one.
  std::int64_t score_heads = 0, score_seq = 0, first_score = 0;

  std::int64_t group() const { return heads / kv_heads; }  ///< query heads per key-value head
  /// Whether some query does not see all keys after it; before it.
  bool causal() const { return seen.ahead < seq; }
  bool windowed() const { return seen.behind < seq - 1; }
  /// The number of head h's score of the call's first query and key.
  std::int64_t first_score_of(std::int64_t b, std::int64_t h) const {
    return first_score + (b * score_heads + h) * score_seq * score_seq;
  }
  std::int64_t width() const { return (heads + 2 * kv_heads) * dim; }
  /// Columns of the packed projections where the heads of group g begin.
  std::int64_t query_col(std::int64_t g, std::int64_t r) const { return (g * (group() + 2) + r) * dim; }
  std::int64_t key_col(std::int64_t g) const { return query_col(g, group()); }
  std::int64_t value_col(std::int64_t g) const { return query_col(g, group() + 1); }
};
AttentionExtents attention_extents(const char* kernel, const Tensor& qkv, const Attention& geometry);

/// Rows of a call that see each other and no others, a sequence or a document: extents and scores as if it
/// were a call by itself.
struct AttentionPart : AttentionExtents {
  std::int64_t row = 0;                  ///< its first one among all of the call
  std::int64_t first_lse = 0, step = 0;  ///< where the numbers of its head 0 begin in lse; from head to head
  RandomKey key{};                       ///< the stream of dropout
  std::int64_t lse_of(std::int64_t head) const { return first_lse + head * step; }
};
/// All parts of a call that have rows; documents with the longest first.
std::vector<AttentionPart> attention_parts(const AttentionExtents& e, const Attention& geometry);

AttentionExtents check_attention(const char* kernel, const Tensor& qkv, const Attention& geometry,
                                 const Tensor& out, const Tensor& lse);
AttentionExtents check_attention_backward(const char* kernel, const Tensor& qkv, const Attention& geometry,
                                          const Tensor& out, const Tensor& lse, const Tensor& dout,
                                          const Tensor& dqkv);

/// The extents of attend_stored(); `seq` counts the rows of the call, and `seen` means nothing.
struct StoredExtents : AttentionExtents {
  std::int64_t texts = 0, capacity = 0;
  std::int64_t window = 0;  ///< keys that a row sees at most
};
StoredExtents check_attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                  const Tensor& sinks, const Tensor& out);

/// Rows of `dim` elements for each head of each of `rows` queries of `batch` sequences.
struct SinkExtents {
  std::int64_t batch = 0, rows = 0, heads = 0, dim = 0;
  /// The number of a head's row in lse; `row` counts those of all sequences.
  std::int64_t lse_of(std::int64_t row, std::int64_t head) const {
    return (row / rows * heads + head) * rows + row % rows;
  }
};
SinkExtents check_attention_sinks(const char* kernel, const Tensor& sinks, const Tensor& out,
                                  const Tensor& lse);
/// dout and dsinks fit the others.
SinkExtents check_attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                           const Tensor& dout, const Tensor& dsinks);

/// The arguments of delta_rule() and its gradient.
struct DeltaExtents {
  std::int64_t batch = 0, rows = 0, width = 0, blocks = 0;
  std::int64_t key_heads = 0, value_heads = 0, repeats = 0, key_dim = 0, value_dim = 0;
};
DeltaExtents check_delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                              const StateStore& store, const Tensor& states, const Tensor& out);
DeltaExtents check_delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                       const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                       const Tensor& dgates);

/// The arguments of delta_gates() and its gradient.
struct GateExtents {
  std::int64_t rows = 0, heads = 0, repeats = 0;
  /// Where a value head's two numbers are in a row of x.
  std::size_t b(std::int64_t head) const {
    return static_cast<std::size_t>(head / repeats * 2 * repeats + head % repeats);
  }
  std::size_t a(std::int64_t head) const { return b(head) + static_cast<std::size_t>(repeats); }
};
GateExtents check_delta_gates(const char* kernel, const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                              int key_heads, const Tensor& gates);
GateExtents check_delta_gates_backward(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                                       int key_heads, const Tensor& dgates, const Tensor& dx,
                                       const Tensor& parts);

/// The arguments of short_conv() and its gradient.
struct ConvExtents {
  std::int64_t batch = 0, rows = 0, columns = 0, taps = 0;
};
ConvExtents check_short_conv(const char* kernel, const Tensor& x, const Tensor& weight,
                             const Documents* documents, const StateStore& store, const Tensor& out);
ConvExtents check_short_conv_backward(const Tensor& x, const Tensor& weight, const Documents* documents,
                                      const Tensor& dout, const Tensor& dx, const Tensor& dweight);

/// `rows` rows of each of `batch` sequences go into rows of `seq`.
struct MergeExtents {
  std::int64_t batch = 0, rows = 0, seq = 0;
  std::int64_t heads = 0, dim = 0;
};
MergeExtents check_merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first,
                                   const Tensor& out, const Tensor& lse);

/// c[m,n] = a[m,k]·b[k,n]
struct MatmulExtents {
  std::int64_t m = 0, n = 0, k = 0;
};
MatmulExtents check_matmul(const Matmul& args);

}  // namespace sherd::tensor
