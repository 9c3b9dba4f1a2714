#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "data/packing/packing.h"

namespace sherd::data {

/// How pairs of texts are made.
struct PairOptions {
  std::int64_t seq_length = 0;  ///< places of a row, those of three tokens around the texts included
  std::uint64_t seed = 1234;
  bool shuffle = true;
  std::int64_t vocab_size = 0;  ///< ids are checked against it; 0: they are not
  std::int32_t begin = 0;       ///< in front of both texts ("[CLS]"), and of documents
  std::int32_t end = 0;         ///< behind each ("[SEP]"), and behind documents
  double short_share = 0.1;     ///< of rows that are made shorter, at random
  std::vector<bool> goes_on{};  ///< ids that go on with the word before them: vocab_size, or none
};

/// Rows of two texts, begin A end B end, of which the second goes on with the first in one half, and in the
/// other is as long a part of another document (next sentence prediction, Devlin et al. 2019, 3.1 and A.2;
/// of parts of texts, where the paper's are made of whole sentences). Documents are cut into pieces of what a
/// row holds, without a last one of a single token. A piece is A and B, cut in front of a word; a row that is
/// made shorter has its beginning alone. The other document's part begins with a word too. Every round takes
/// the pieces in another order, and cuts them anew. Types tell A and B apart. What fills a row up is a
/// document of its own. All is a function of the seed, of the dataset's fingerprint, and of the position.
///
/// Held in memory: 8 bytes per piece, 8 per document, and per round in use 12 per piece.
class PairSamples final : public Samples {
 public:
  /// Throws Error{data} for a range without two documents of two tokens, and for a dataset whose documents
  /// have several sequences, Error{config} for rows that do not hold a pair. `what` names the range.
  PairSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range, PairOptions options,
              const std::string& what = "dataset");

  std::int64_t seq_length() const override { return options_.seq_length; }
  std::int64_t tokens() const override { return tokens_; }
  /// As if every text went on, whole.
  std::int64_t tokens_before(std::int64_t position) const override {
    return rounds_->tokens_before(position);
  }
  std::int64_t samples_per_round() const override { return std::ssize(pieces_); }
  RowTraits traits() const override { return {.keeps_documents_apart = true, .pairs_texts = true}; }
  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;

 private:
  /// A document's text, without the tokens at its ends.
  struct Document {
    std::uint32_t sequence = 0;  // from the range's beginning
    std::int32_t length = 0;
  };
  /// `room()` tokens of a document, or what is left of it.
  struct Piece {
    std::uint32_t document = 0, chunk = 0;
  };
  using Ids = std::vector<std::int32_t>;

  static constexpr std::int64_t around = 3;  ///< tokens around both texts
  std::int64_t room() const { return options_.seq_length - around; }
  std::int64_t places_of(const Piece& piece) const { return length_of(piece) + around; }
  void find_ends(std::int64_t sequence);
  std::int64_t length_of(const Piece& piece) const;
  const Piece& at(std::int64_t position) const { return pieces_[rounds_->at(position)]; }
  Ids read(const Document& document, std::int64_t from, std::int64_t count) const;
  bool begins_word(std::int32_t id) const;
  Ids of_another(const RandomKey& random, std::uint32_t not_of, std::int64_t count) const;

  std::shared_ptr<const IndexedDataset> dataset_;
  SequenceRange range_;
  PairOptions options_;
  std::vector<Document> documents_;
  std::vector<Piece> pieces_;
  std::int64_t tokens_ = 0;
  std::uint32_t fingerprint_ = 0;
  bool begun_ = false, ended_ = false;  ///< documents begin with options_.begin, and end with options_.end
  std::optional<ShuffledRounds> rounds_;
};

}  // namespace sherd::data
