#include "data/packing/document_packing.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
DocumentSamples::DocumentSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                                 PackingOptions options, std::int32_t padding, const std::string& what)
    : dataset_(std::move(dataset)), range_(range), options_(options), padding_(padding) {
  require(range.begin >= 0 && range.begin <= range.end && range.end <= dataset_->sequences(), "sequences ",
          range.begin, " to ", range.end, " of ", dataset_->sequences());
  if (room() < 1)
    fail(ErrorKind::config, "the sequence length must be at least 1, not ", options.seq_length,
         options.prompt.count > 0 ? cat(" with ", options.prompt.count, " virtual tokens") : "");
  find_pieces();
  if (pieces_.empty())
    fail(ErrorKind::data, "the ", what, " of '", dataset_->prefix(),
         "' has no document with tokens to learn from in ", counted(range.size(), "sequence"),
         "; give it a larger part in data.split, or prepare more text");
  const auto length = [this](std::uint32_t i) { return places_of(pieces_[i]); };
  packing_.emplace(pieces_.size(), length, length, options_.seq_length, options_.seed, options_.shuffle);
}

std::int64_t DocumentSamples::places_of(const DocumentPiece& piece) const {
  const std::int64_t left = own_places(range_.begin + piece.sequence) - piece.chunk * room();
  return options_.prompt.count + std::min(left, room());
}

void DocumentSamples::find_pieces() {
  std::vector<std::uint8_t> mask;
  for (std::int64_t i = range_.begin; i < range_.end; ++i) {
    const std::int64_t places = own_places(i);
    tokens_ += dataset_->length(i);
    const bool is_cut = places > room();
    cut_ += is_cut;
    const std::int64_t kept = has_classes() ? std::min(places, room()) : places;
    for (std::int64_t chunk = 0; chunk * room() < kept; ++chunk) {
      const std::int64_t begin = chunk * room(), read = std::min(places - begin, room());
      if (is_cut && dataset_->has_mask() &&
          options_.targets == Targets::next_tokens) {  // a part of a long question has nothing to learn from
        const std::int64_t first = options_.prompt.count > 0 ? begin : begin + 1;  // to be predicted
        mask.resize(static_cast<std::size_t>(begin + read + 1 - first));
        dataset_->read_mask(i, first, mask);
        if (std::find(mask.begin(), mask.end(), 1) == mask.end()) continue;
      }
      pieces_.push_back({static_cast<std::uint32_t>(i - range_.begin), static_cast<std::uint32_t>(chunk)});
    }
  }
  require(pieces_.size() < std::numeric_limits<std::uint32_t>::max() &&
              range_.size() < std::numeric_limits<std::uint32_t>::max(),
          "more than 2^32 documents in one dataset; split it into several data.sources");
}

double DocumentSamples::filled() const {
  return static_cast<double>(packing_->places()) /
         static_cast<double>(samples_per_round() * options_.seq_length);
}

std::int64_t DocumentSamples::tokens_before(std::int64_t position) const {
  return packing_->places_before(position);
}

/// Calls visit(sequence, offset, tokens) for the pieces of a row, in order: how many tokens are read.
template <class Visit>
void DocumentSamples::for_each_piece(std::int64_t position, Visit&& visit) const {
  packing_->for_each_item(position, [&](std::uint32_t item) {
    const DocumentPiece& piece = pieces_[item];
    visit(range_.begin + piece.sequence, piece.chunk * room(), places_of(piece) - options_.prompt.count);
  });
}

void DocumentSamples::load_classes(std::int64_t sequence, std::span<const std::int32_t> ids,
                                   std::span<std::int32_t> labels, std::span<std::int32_t> types) const {
  if (options_.targets == Targets::token_classes)
    read_token_classes(*dataset_, sequence, labels);
  else
    dataset_->read(sequence, own_places(sequence), labels.first(1));
  const std::vector<std::int32_t> of_parts = types_of_parts(ids, padding_);
  std::copy(of_parts.begin(), of_parts.end(), types.begin());
}

void DocumentSamples::load(std::int64_t position, SampleRow& row) const {
  const auto length = static_cast<std::size_t>(options_.seq_length);
  row.tokens.assign(length, padding_);
  row.labels.assign(length, no_label);
  row.ends.clear();
  row.types.assign(has_classes() ? length : 0, 0);
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;
  std::size_t begin = 0;
  for_each_piece(position, [&](std::int64_t sequence, std::int64_t offset, std::int64_t read) {
    const bool next_tokens = options_.targets == Targets::next_tokens;
    ids.resize(static_cast<std::size_t>(read) + (next_tokens ? 1 : 0));
    dataset_->read(sequence, offset, ids);
    if (options_.vocab_size > 0) dataset_->check_ids(ids, sequence, offset, options_.vocab_size);
    const auto places = static_cast<std::size_t>(options_.prompt.count + read);
    const auto tokens = std::span(row.tokens).subspan(begin, places),
               labels = std::span(row.labels).subspan(begin, places);
    if (next_tokens) {
      mask.assign(ids.size(), 1);
      if (dataset_->has_mask()) dataset_->read_mask(sequence, offset, mask);
      write_text(options_.prompt, ids, mask, tokens, labels);
    } else {
      if (has_classes() && own_places(sequence) > room()) ids.back() = padding_;
      std::copy(ids.begin(), ids.end(), tokens.begin());
      if (has_classes())
        load_classes(sequence, ids, labels, std::span(row.types).subspan(begin, places));
      else
        std::copy(ids.begin(), ids.end(), labels.begin());
    }
    begin += places;
    row.ends.push_back(static_cast<std::int32_t>(begin));
  });
  row.filling = static_cast<std::int32_t>(length - begin);
  if (begin < length) row.ends.push_back(static_cast<std::int32_t>(length));
}

void DocumentSamples::will_need(std::int64_t position) const {
  for_each_piece(position, [&](std::int64_t sequence, std::int64_t offset, std::int64_t read) {
    dataset_->will_need(sequence, offset, read + (options_.targets == Targets::next_tokens ? 1 : 0));
    if (has_classes()) {
      const std::int64_t first = own_places(sequence);
      dataset_->will_need(sequence, first, std::min(read, dataset_->length(sequence) - first));
    }
  });
}

}  // namespace sherd::data
