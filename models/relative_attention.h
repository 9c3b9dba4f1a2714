#pragma once

#include "models/gpt_config.h"
#include "nn/layers.h"
#include "sharding/parallel/linear.h"

namespace sherd::models {

using autograd::Tape;
using autograd::Var;

/// The bucket of a key that lies `distance` positions behind its query, below 0 before it (Raffel et al.
/// 2020, 2.1, as T5 computes it): half of the buckets have one distance each, the others ranges that grow by
/// a factor up to most_distance, from which on all share the last. `both_sides`: the upper half of all
/// buckets is for keys behind the query; else these share bucket 0.
std::int64_t relative_bucket(std::int64_t distance, bool both_sides, std::int64_t buckets,
                             std::int64_t most_distance);

/// The bias that attention's scores get for the distance between key and query: a number per head and bucket,
/// which all layers of an encoder, or of a decoder, share. Parameter: "weight", logical [heads, buckets], cut
/// by heads. A block, so that layers can borrow it alone.
class RelativePositions : public nn::Module {
 public:
  RelativePositions(const GptConfig& config, bool both_sides, const parallel::Layout& layout);
  /// AttentionMask::distances of this rank's heads, for queries from position `first` on and keys from 0 on.
  Var distances(Tape& tape, std::int64_t queries, std::int64_t keys, std::int64_t first = 0);
  const nn::ParameterPtr& weight() const { return weight_; }

 private:
  bool both_sides_;
  std::int64_t buckets_, most_distance_;
  nn::ParameterPtr weight_;
};

/// T5's attention: of a stream to itself, or of a decoder's to what an encoder made. Parts: "q" and
/// "projection", "kv" [2·heads·head_dim, hidden], keys above values, "dropout", which names the stream of the
/// scores' mask, and of attention to itself "positions", which its stack shares. Tensor ranks have their own
/// heads.
///
/// With a key cache (autograd/key_cache.h) a decoder's rows continue texts; keys and values of an encoder are
/// made by the pass that reads it, and stay.
class RelativeAttention : public nn::Layer {
 public:
  /// `positions`: null for attention to an encoder. `layer`: the index of its block; an encoder's queries see
  /// keys behind them too, and no place that fills up a source (Tape::source_lengths).
  RelativeAttention(const GptConfig& config, std::int64_t layer, const parallel::Layout& layout,
                    std::shared_ptr<RelativePositions> positions);
  /// Attention of x, [batch, rows, hidden], to `source`, [batch, rows there, hidden], which is undefined
  /// where a key cache has its keys.
  Var attend(Tape& tape, const Var& x, const Var& source);

 protected:
  Var forward(Tape& tape, const Var& x) override { return attend(tape, x, x); }

 private:
  struct KeysAndValues {
    Var keys, values;
  };
  KeysAndValues project(Tape& tape, const Var& source);
  autograd::AttentionMask mask(Tape& tape, std::int64_t batch, std::int64_t keys);
  Var continued(Tape& tape, const Var& queries, const Var& source);

  bool causal_, to_source_;
  std::int64_t heads_, first_head_, all_heads_, head_dim_;  ///< the first two: this rank's
  float scale_;
  std::shared_ptr<parallel::ColumnLinear> q_, kv_;
  std::shared_ptr<parallel::RowLinear> projection_;
  std::shared_ptr<nn::Dropout> dropout_;
  std::shared_ptr<RelativePositions> positions_;  ///< null: none. Somebody else's part
};

}  // namespace sherd::models
