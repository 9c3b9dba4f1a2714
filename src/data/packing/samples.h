#pragma once

#include <cstdint>
#include <vector>

namespace sherd::data {

/// Stands in labels for a token that is no target of the loss (PyTorch's ignore_index).
inline constexpr std::int32_t no_label = -100;

/// Tokens that stand in front of each text: ids [first, first + count), which no text has.
struct VirtualTokens {
  std::int64_t first = 0, count = 0;
};

/// A sample as a model takes it.
struct SampleRow {
  /// seq_length each; labels[i]: what is learned of tokens[i], the token behind it for one, or no_label.
  std::vector<std::int32_t> tokens, labels;
  std::vector<std::int32_t> types;  ///< of the tokens; empty: all are of the first type
  /// Where documents end that do not see each other, the last one at seq_length; empty: the row is one text.
  std::vector<std::int32_t> ends;
  std::int32_t filling = 0;  ///< places at its end that hold no token
  std::int32_t source = 0;   ///< how many of the encoder's places, the first ones, do; where samples tell
  /// Whether the second of a pair of texts goes on with the first: 0, else 1.
  std::int32_t sentence = no_label;
  /// For rows whose texts have sides, one each for every document, or for the row where it is one. `sides`: 1
  /// chosen, -1 rejected, 0 filling. `texts`: the number among the texts of a run; -1: filling.
  std::vector<std::int32_t> sides, texts;
};

/// Traits that all rows of a sequence of samples share.
struct RowTraits {
  bool keeps_documents_apart = false;  ///< ends
  bool tells_sources = false;          ///< SampleRow::source: how much of an encoder's places holds tokens
  bool pairs_texts = false;            ///< two texts (SampleRow::sentence)
  bool has_few_targets = false;        ///< labels of few tokens, which batches then tell
  bool has_sides = false;              ///< answers that people compared or judged
  bool has_pairs = false;              ///< sides come in pairs, the rejected behind the chosen one
  bool has_mismatched = false;         ///< rows beside them with other answers to the same prompts
};

/// An endless sequence of samples. What lies at a position is a pure function of the data, the settings and
/// the position. Safe to share between ranks and threads.
class Samples {
 public:
  virtual ~Samples() = default;

  virtual std::int64_t seq_length() const = 0;
  /// Tokens that one pass over the data has.
  virtual std::int64_t tokens() const = 0;
  /// Tokens that the samples before `position` ≥ 0 have, without places that only fill rows up.
  virtual std::int64_t tokens_before(std::int64_t position) const = 0;
  /// Samples that make one pass, or as many passes as are shuffled together.
  virtual std::int64_t samples_per_round() const = 0;
  virtual RowTraits traits() const { return {}; }

  /// Writes the sample at `position` ≥ 0. Throws Error{data} naming file, token, id for an id outside the
  /// vocabulary.
  virtual void load(std::int64_t position, SampleRow& row) const = 0;
  /// The same with answers that belong to other prompts, where RowTraits::has_mismatched.
  virtual void load_mismatched(std::int64_t position, SampleRow& row) const;
  /// Asks the kernel to read that sample ahead.
  virtual void will_need(std::int64_t position) const = 0;
};

}  // namespace sherd::data
