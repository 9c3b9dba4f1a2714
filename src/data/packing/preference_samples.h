#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/packing/row_packing.h"

namespace sherd::data {

/// How answers that people compared or judged become rows.
struct PreferenceOptions {
  std::int64_t seq_length = 0;
  std::uint64_t seed = 1234;
  bool shuffle = true;
  std::int64_t vocab_size = 0;  ///< ids are checked against it; 0: they are not
  std::int32_t padding = 0;     ///< the id behind the last text of a row
  /// Whether a row takes as many texts as fit, which do not see each other; else each text has a row of its
  /// own, the rejected one's behind the chosen one's.
  bool packed = false;
  bool pairs = true;  ///< chosen and rejected come together, in this order; else each text by itself
  /// Whether a text's only target is its last token, with itself for a label: there a model that has read all
  /// of it gives its score. The text then takes as many places as it has tokens.
  bool whole = false;
  bool mismatched = false;      ///< rows have a counterpart with other answers; for texts by themselves
  std::int64_t first_text = 0;  ///< the number of the dataset's first sequence among the run's texts
};

/// Samples of texts with sides, of a dataset as DatasetInfo::preferences says. A text of n tokens takes n − 1
/// places, and its targets are the tokens of its answer. One that is too long loses its end; a pair in one
/// row has its places together, of which each text may have half, and what the other leaves. What has no
/// target then is left out.
///
/// The mismatched like of a row has in the place of each text its prompt with another's answer: of the text
/// that lies half of the dataset's part further (KTO's estimate of a divergence takes these; Ethayarajh et
/// al. 2024, "KTO", 4.1).
///
/// Held in memory: 4 bytes per item (pair or text), 8 with mismatched, and what RowPacking takes, or 12 per
/// item and round in use.
class PreferenceSamples final : public Samples {
 public:
  /// `range`: of the dataset's sequences, beginning and ending with documents. Throws Error{data} where it
  /// has nothing to learn from, Error{config} for a bad seq_length. `what` names the range.
  PreferenceSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                    PreferenceOptions options, const std::string& what = "dataset");

  std::int64_t seq_length() const override { return options_.seq_length; }
  std::int64_t tokens() const override { return tokens_; }
  std::int64_t tokens_before(std::int64_t position) const override;
  std::int64_t samples_per_round() const override;
  RowTraits traits() const override {
    return {.keeps_documents_apart = options_.packed,
            .has_few_targets = true,
            .has_sides = true,
            .has_pairs = options_.pairs,
            .has_mismatched = options_.mismatched};
  }
  void load(std::int64_t position, SampleRow& row) const override;
  void load_mismatched(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;

  std::int64_t items() const { return std::ssize(items_); }
  /// Items that lose tokens, and those that were left out.
  std::int64_t cut() const { return cut_; }
  std::int64_t left_out() const { return left_out_; }
  /// The share of places that are no padding.
  double filled() const;

 private:
  /// Places that the texts of an item have; of a text by itself the first.
  struct Places {
    std::int64_t chosen = 0, rejected = 0;
  };
  /// A text of a row: the places it takes, and whose they are.
  struct Text {
    std::int64_t sequence, places;
  };
  /// Places of a whole text.
  std::int64_t own_places(std::int64_t sequence) const {
    return dataset_->length(sequence) - (options_.whole ? 0 : 1);
  }
  bool is_absent(std::int64_t sequence) const;
  void find_items();
  bool has_target(std::int64_t sequence, std::int64_t places) const;
  std::int64_t sequence_of(std::uint32_t item) const { return range_.begin + items_[item]; }
  Places places_of(std::int64_t sequence) const;
  /// Places of an item's texts; and those that it takes in a packed row, whose mismatched counterpart has
  /// them, too.
  std::int64_t own_length(std::uint32_t item) const;
  std::int64_t length_of(std::uint32_t item) const;
  std::vector<Text> texts_at(std::int64_t position) const;
  std::vector<std::uint32_t> items_at(std::int64_t position) const;
  std::int64_t rows_of_item() const { return options_.pairs ? 2 : 1; }
  std::uint32_t partner(std::uint32_t item) const;
  std::int32_t side_of(std::int64_t sequence) const { return (sequence - range_.begin) % 2 == 0 ? 1 : -1; }
  void begin_row(SampleRow& row) const;
  void append(SampleRow& row, std::size_t at, const std::vector<std::int32_t>& ids,
              const std::vector<std::uint8_t>& targets, std::int64_t sequence) const;
  void end_row(SampleRow& row, std::size_t used) const;
  void read(std::int64_t sequence, std::int64_t from, std::int64_t to, std::vector<std::int32_t>& ids,
            std::vector<std::uint8_t>& targets) const;

  std::shared_ptr<const IndexedDataset> dataset_;
  SequenceRange range_;
  PreferenceOptions options_;
  std::int64_t tokens_ = 0, cut_ = 0, left_out_ = 0;
  std::vector<std::uint32_t> items_;      // their first sequences, from the range's beginning
  std::vector<std::int32_t> prompts_;     // with mismatched: tokens before each text's first target
  std::optional<RowPacking> packing_;     // where packed
  std::optional<ShuffledRounds> rounds_;  // else
};

}  // namespace sherd::data
