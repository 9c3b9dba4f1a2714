#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "autograd/tape.h"

// Generation: what attention keeps of texts between the passes that continue them, and where their rows lie.

namespace sherd::autograd {

/// Keys and values of texts that are under way, of every layer of a model, so that a pass runs the new tokens
/// alone. A tape that has one (Tape::key_cache) runs a batch of rows [sequences, rows], each sequence the
/// next rows of some text: attention stores their keys and sees those before, and positions count from the
/// text's beginning. Layers are told apart by their order in the pass, in which every pass runs them; a
/// stage of a pipeline has its own. Used from the rank's thread, by one pass at a time; not for recording,
/// and neither for context-parallel ranks nor for sequence parallelism, which cut the rows.
///
/// Memory: activations in the ledger, taken layer by layer in the first pass: 2·texts·positions·kv_heads·
/// head_dim elements of the layer's dtype, half of that where values are the keys, and of a layer with a
/// sliding window min(positions, window) in the place of positions (rows are a ring); and the states of texts
/// of layers that have such.
class KeyCache {
 public:
  /// Rows of the coming pass: `count` rows that count, from position `first` on of text `text`. Rows behind
  /// them, to where the batch is rectangular, give anything and change nothing.
  struct Rows {
    std::int64_t text = 0, first = 0, count = 0;
    std::int64_t source = 0;  ///< of an encoder's rows in front, how many hold tokens, the first ones; 0: all
  };

  /// Room for texts 0 … texts - 1 of up to `positions` tokens each.
  KeyCache(std::int64_t texts, std::int64_t positions);

  /// A pass follows, of sequences with these rows, no text twice; `width`: the rows of the batch, counting or
  /// not. A text's keys from `first` on are forgotten: 0 begins another text in its place. Throws
  /// Error{usage} for rows that are not among the texts' positions.
  /// `source_rows`: rows of an encoder that stand in front of each sequence, as many in all, where texts of a
  /// decoder begin; they are not among `rows`.
  void begin(tensor::Device& device, std::vector<Rows> rows, std::int64_t width,
             std::int64_t source_rows = 0);
  /// Between passes: text `to` has from now on a copy of what layers keep of text `from`, and goes on by
  /// itself. Not for layers that find their attention themselves.
  void fork(tensor::Kernels& kernels, std::int64_t from, std::int64_t to);
  std::int64_t source_rows() const { return source_rows_; }
  /// How many of these rows hold tokens, by sequence; null: all do, or there are none.
  std::shared_ptr<const std::vector<std::int32_t>> source_lengths() const { return source_lengths_; }
  const std::vector<Rows>& rows() const { return rows_; }
  /// Every text of the pass begins with it, by several rows: they see nothing but each other.
  bool fresh() const { return fresh_; }
  /// Every sequence of the pass has one row.
  bool one_row_each() const { return width_ == 1; }
  std::int64_t texts() const { return texts_; }
  std::int64_t positions() const { return positions_; }
  /// Taken so far.
  std::size_t bytes() const;

  /// Called by autograd::attention(), once per layer: stores the keys of qkv [sequences, width, …] and gives
  /// the attention of its rows. `values_are_keys`: a head's value is its key, which alone is stored.
  Tensor attend(Tape& tape, const Tensor& qkv, const tensor::Attention& geometry, const Tensor& sinks = {},
                bool values_are_keys = false);
  /// In its place, of a layer that finds its attention itself: stores the keys.
  void store(Tape& tape, const Tensor& qkv, const tensor::Attention& geometry, bool values_are_keys);
  /// The keys and values of one text in a layer that computes its attention itself, as it gave them: [1,
  /// room, heads, width], of which the first `rows` are there.
  struct TextKeys {
    Tensor keys, values;
    std::int64_t rows = 0;
  };
  /// The store of such a layer, by text; called once per layer.
  std::vector<TextKeys>& text_keys();
  /// For kernels that keep a state `each` of every text in the place of keys, once per layer and kernel;
  /// their rows go on where those before ended, or begin. rows: the shape of the kernel's input, [sequences,
  /// width, …].
  tensor::StateStore states(Tape& tape, const Shape& rows, const Shape& each, DType dtype);

 private:
  struct LayerStore {
    Tensor keys, values;  ///< as tensor::KeyStore has them; or states as keys
  };
  const LayerStore& next_layer(tensor::Device& device, const Tensor& qkv, const tensor::Attention& geometry,
                               bool values_are_keys);

  std::int64_t texts_, positions_;
  std::vector<LayerStore> layers_;
  std::deque<std::vector<TextKeys>> text_keys_;  ///< by layer
  std::vector<std::int64_t> ends_;               ///< of each text, the rows that its states have seen
  std::vector<Rows> rows_;
  std::int64_t width_ = 0, source_rows_ = 0;
  std::shared_ptr<const std::vector<std::int32_t>> source_lengths_;
  bool fresh_ = false;   ///< no sequence of the pass has keys yet
  bool goes_on_ = true;  ///< every sequence begins, or goes on where its text ended
  Tensor places_;
  std::size_t next_ = 0, next_text_keys_ = 0;
};

/// While it lives, what runs on `tape` continues the texts of `cache`, and nothing is recorded.
class WithKeyCache {
 public:
  WithKeyCache(Tape& tape, KeyCache& cache) : no_grad_(tape), cache_(tape.key_cache, &cache) {}

 private:
  Tape::NoGrad no_grad_;
  Replaced<KeyCache*> cache_;
};

/// Sequences [begin, end) of a batch whose rows have the same positions.
struct SameStart {
  std::int64_t begin, end;
  tensor::Positions positions;
};
/// The whole batch at `positions`, or with a key cache its sequences by where they go on.
std::vector<SameStart> by_start(const Tape& tape, std::int64_t batch, const tensor::Positions& positions);

}  // namespace sherd::autograd
