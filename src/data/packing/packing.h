#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/indexed_dataset.h"
#include "data/packing/samples.h"

namespace sherd::data {

/// Sequences [begin, end) of a dataset.
struct SequenceRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const SequenceRange&) const = default;
};

/// Cuts `sequences` into consecutive ranges, one per fraction: bounds are the running sums of the fractions
/// times `sequences`, rounded half to even. Throws Error{config} unless each fraction is ≥ 0 and they sum to
/// (0, 1].
std::vector<SequenceRange> split_sequences(std::int64_t sequences, std::span<const double> fractions);

/// Appends `end` to a text that does not end with it.
void end_text(std::vector<std::int32_t>& ids, std::int32_t end);

/// The first `most` tokens of a longer text, of which the last is `end` (as transformers truncates).
void cut_text(std::vector<std::int32_t>& ids, std::int64_t most, std::int32_t end);

/// The types of a text's tokens: 0 up to the first `end` that others follow, then 1 (BERT's segments of a
/// pair).
std::vector<std::int32_t> types_of_parts(std::span<const std::int32_t> ids, std::int32_t end);

/// Writes a text as a model reads it: the virtual tokens, then all tokens of `ids` but the last, each with
/// the token after it as its label, or no_label where that is no target; the first token of the text is the
/// label of the last virtual one. targets: as many as ids. tokens, labels: count + ids.size() - 1 elements.
void write_text(const VirtualTokens& prompt, std::span<const std::int32_t> ids,
                std::span<const std::uint8_t> targets, std::span<std::int32_t> tokens,
                std::span<std::int32_t> labels);

/// The labels of samples: the next tokens; the tokens themselves; for each document's first token the
/// document's class, which is the last of its ids and takes no place; or the classes of tokens, as
/// read_token_classes().
enum class Targets { next_tokens, tokens, classes, token_classes };

/// How many ids of a sequence of so many are tokens of text.
std::int64_t text_tokens(std::int64_t ids, Targets targets);

/// Reads the classes of the first tokens of a sequence whose tokens have them. Such a sequence has n tokens
/// and behind them n ids, of each token 1 + its class, or 0 where it has none: as the class of a text lies
/// behind it, so that a document is one sequence, with one length, order and checksum; and no id is negative.
/// Here no_label stands for none. Of a text that is longer the last one asked for has none, as cut_text()
/// makes it the end.
void read_token_classes(const IndexedDataset& dataset, std::int64_t sequence, std::span<std::int32_t> out);

struct PackingOptions {
  std::int64_t seq_length = 0;  ///< places of a sample, those of `prompt` included
  std::uint64_t seed = 1234;    ///< its low 32 bits seed the shuffles
  bool shuffle = true;          ///< else documents and samples keep the dataset's order
  /// How many samples a run will take, if known: as many epochs as that needs are then shuffled together, as
  /// Megatron does, and the last of them apart when less than 80 % of it is needed. 0: every epoch is
  /// shuffled by itself.
  std::int64_t total_samples = 0;
  std::int64_t vocab_size = 0;  ///< ids are checked against it when a sample is read; 0: they are not
  Targets targets = Targets::next_tokens;
  VirtualTokens prompt = {};  ///< in front of each sample, or of each document where they are kept apart
};

/// The last two rounds of an endless order that were asked for: ranks that share it are at most a round
/// apart. Safe to share between threads.
template <class Round>
class RecentRounds {
 public:
  /// Round `index`, made by `make()` unless it is there.
  template <class Make>
  std::shared_ptr<const Round> get(std::int64_t index, Make&& make) const {
    std::lock_guard lock(mutex_);
    for (const auto& [known, round] : recent_)
      if (known == index) return round;
    std::shared_ptr<const Round> made = make();
    if (recent_.size() == 2) recent_.erase(recent_.begin());
    recent_.emplace_back(index, made);
    return made;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::int64_t, std::shared_ptr<const Round>>> recent_;  // newest last
};

/// Samples in an endless order: every round is shuffled with a seed of its own, or has the order of the
/// samples.
class ShuffledRounds {
 public:
  /// `tokens_of`: how many tokens a sample has.
  ShuffledRounds(std::size_t samples, std::uint64_t seed, bool shuffle,
                 std::function<std::int64_t(std::uint32_t)> tokens_of);
  /// The sample at `position` ≥ 0, and the tokens of those before.
  std::uint32_t at(std::int64_t position) const;
  std::int64_t tokens_before(std::int64_t position) const;

 private:
  struct Round {
    std::vector<std::uint32_t> order;
    std::vector<std::int64_t> tokens;  // before each place, and of all
  };
  std::shared_ptr<const Round> round(std::int64_t position) const;

  std::int64_t samples_;
  std::uint64_t seed_;
  bool shuffle_;
  std::function<std::int64_t(std::uint32_t)> tokens_of_;
  RecentRounds<Round> rounds_;
};

/// Samples packed from the sequences of a range, which follow each other in a shuffled order without regard
/// to document bounds. Sample i of a round reads tokens
/// [i·s, i·s + s] of that stream, so a sample begins with the token that its predecessor ended with, and a
/// round of T tokens has (T-1)/s samples. They are taken in a second shuffled order. Position p is a pure
/// function of dataset, options and p: round p / n, place p mod n; round r is seeded with seed + r. Follows
/// Megatron Core's GPTDataset; no sample index is stored, only the two orders (4 bytes per sequence and per
/// sample) and a running sum per 64 sequences. With virtual tokens s is what they leave of seq_length.
class PackedSamples final : public Samples {
 public:
  /// Throws Error{data} when the range has too few tokens for one sample, Error{config} for a bad seq_length.
  /// `what` names the range in that message, "training split" for example.
  PackedSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range, PackingOptions options,
                std::string what = "dataset");
  ~PackedSamples() override;

  std::int64_t seq_length() const override { return options_.seq_length + options_.prompt.count; }
  /// Tokens in the range: one epoch.
  std::int64_t tokens() const override { return tokens_; }
  std::int64_t tokens_before(std::int64_t position) const override { return position * seq_length(); }
  /// Epochs shuffled together: 1 unless total_samples asks for more.
  std::int64_t epochs_per_round() const { return epochs_; }
  std::int64_t samples_per_round() const override { return samples_; }

  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;

  /// The sample of its round that lies at `position`, by its number in the unshuffled order.
  std::int64_t sample_at(std::int64_t position) const;
  /// The sequences in the order in which round `round` chains them.
  std::vector<std::int64_t> sequence_order(std::int64_t round) const;

 private:
  struct Round;
  std::shared_ptr<const Round> round(std::int64_t index) const;
  std::shared_ptr<const Round> make_round(std::int64_t index) const;
  void shuffle_round(Round& round, std::uint32_t seed) const;
  std::int64_t sequence_at(const Round& round, std::int64_t place) const;
  template <class Visit>
  void for_each_part(std::int64_t position, Visit&& visit) const;

  std::shared_ptr<const IndexedDataset> dataset_;
  SequenceRange range_;
  PackingOptions options_;  ///< whose seq_length is that of the text
  std::int64_t tokens_ = 0, epochs_ = 1, samples_ = 0;
  bool last_epoch_apart_ = false;
  RecentRounds<Round> rounds_;
};

}  // namespace sherd::data
