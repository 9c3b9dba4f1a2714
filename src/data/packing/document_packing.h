#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/packing/row_packing.h"

namespace sherd::data {

/// Samples of whole documents that do not see each other: as many as fit into a row, behind each other, the
/// rest of the row padding (end of document, no labels) that is a document too. A document of n tokens takes
/// n − 1 places, its last token being a label alone (or what Targets says); one that is longer than a row
/// comes in several pieces, each going on where the one before ended, none seeing another (of one with
/// classes the first piece alone, whose last token is then the end of a document). Which
/// go together RowPacking decides. Here a document is a sequence of the dataset.
///
/// With virtual tokens each piece stands behind its own, which take places of the row.
///
/// Held in memory: 12 bytes per document, and per round in use 4 more, and 12 per row.
class DocumentSamples final : public Samples {
 public:
  /// Throws Error{data} where the range has no document that takes a place, Error{config} for a bad
  /// seq_length. PackingOptions::total_samples has no meaning here. `padding`: the id behind the last
  /// document of a row. `what` names the range, "training split" for example.
  DocumentSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range, PackingOptions options,
                  std::int32_t padding, const std::string& what = "dataset");

  std::int64_t seq_length() const override { return options_.seq_length; }
  std::int64_t tokens() const override { return tokens_; }
  std::int64_t tokens_before(std::int64_t position) const override;
  std::int64_t samples_per_round() const override { return packing_->rows(); }
  RowTraits traits() const override { return {.keeps_documents_apart = true}; }
  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;

  /// The share of places that are no padding.
  double filled() const;
  /// Documents that are longer than a row.
  std::int64_t cut() const { return cut_; }

 private:
  /// Part of a sequence: `places` tokens from `offset` on, and the one behind them.
  struct DocumentPiece {
    std::uint32_t sequence = 0, chunk = 0;  // from the range's beginning; its place in the sequence
  };
  /// Tokens of text that a row has room for.
  std::int64_t room() const { return options_.seq_length - options_.prompt.count; }
  /// Tokens of a document that take a place.
  std::int64_t own_places(std::int64_t sequence) const {
    return text_tokens(dataset_->length(sequence), options_.targets);
  }
  bool has_classes() const {
    return options_.targets == Targets::classes || options_.targets == Targets::token_classes;
  }
  /// Places of a row, those of virtual tokens included.
  std::int64_t places_of(const DocumentPiece& piece) const;
  void find_pieces();
  void load_classes(std::int64_t sequence, std::span<const std::int32_t> ids, std::span<std::int32_t> labels,
                    std::span<std::int32_t> types) const;
  template <class Visit>
  void for_each_piece(std::int64_t position, Visit&& visit) const;

  std::shared_ptr<const IndexedDataset> dataset_;
  SequenceRange range_;
  PackingOptions options_;
  std::int32_t padding_;
  std::int64_t tokens_ = 0, cut_ = 0;
  std::vector<DocumentPiece> pieces_;  // in the dataset's order
  std::optional<RowPacking> packing_;  // of the pieces
};

}  // namespace sherd::data
