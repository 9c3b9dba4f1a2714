#include "data/packing/document_packing.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/packing/legacy_random.h"

namespace sherd::data {
namespace {

/// Open rows by what is free in them, of which the fullest that still has enough is taken.
class OpenRows {
 public:
  explicit OpenRows(std::int64_t most)
      : rows_(static_cast<std::size_t>(most) + 1), some_(rows_.size() / 64 + 1) {}

  void put(std::int64_t free, std::uint32_t row) {
    const auto at = static_cast<std::size_t>(free);
    rows_[at].push_back(row);
    some_[at / 64] |= std::uint64_t{1} << at % 64;
  }
  /// The least free space of at least `needed`, which that row no longer has; -1: in no row.
  std::int64_t take(std::int64_t needed, std::uint32_t& row) {
    auto word = static_cast<std::size_t>(needed) / 64;
    std::uint64_t bits = some_[word] >> needed % 64 << needed % 64;
    while (bits == 0 && ++word < some_.size()) bits = some_[word];
    if (bits == 0) return -1;
    const std::size_t free = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
    row = rows_[free].back();
    rows_[free].pop_back();
    if (rows_[free].empty()) some_[word] &= ~(std::uint64_t{1} << free % 64);
    return static_cast<std::int64_t>(free);
  }

 private:
  std::vector<std::vector<std::uint32_t>> rows_;
  std::vector<std::uint64_t> some_;  // a bit for each that is not empty
};

}  // namespace

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
  pack();
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

/// Best fit, the longest first.
void DocumentSamples::pack() {
  std::vector<std::int64_t> lengths(pieces_.size());
  std::transform(pieces_.begin(), pieces_.end(), lengths.begin(),
                 [&](const DocumentPiece& p) { return places_of(p); });
  places_ = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  std::sort(lengths.begin(), lengths.end(), std::greater());
  OpenRows open(options_.seq_length);
  std::vector<std::uint32_t> row_of(lengths.size());
  std::uint32_t rows = 0;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    std::uint32_t row = 0;
    std::int64_t free = open.take(lengths[rank], row);
    if (free < 0) row = rows++, free = options_.seq_length;
    row_of[rank] = row;
    open.put(free - lengths[rank], row);
  }
  starts_.assign(rows + 1, 0);
  for (const std::uint32_t row : row_of) ++starts_[row + 1];
  std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  ranks_.resize(row_of.size());
  std::vector<std::uint32_t> next(starts_.begin(), starts_.end() - 1);
  for (std::size_t rank = 0; rank < row_of.size(); ++rank)
    ranks_[next[row_of[rank]]++] = static_cast<std::uint32_t>(rank);
}

double DocumentSamples::filled() const {
  return static_cast<double>(places_) / static_cast<double>(samples_per_round() * options_.seq_length);
}

std::int64_t DocumentSamples::tokens_before(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  const std::int64_t rounds = position / samples_per_round(), place = position % samples_per_round();
  const std::int64_t whole = rounds * places_;  // every round has the same rows
  return place == 0 ? whole : whole + round(rounds)->tokens[static_cast<std::size_t>(place)];
}

std::shared_ptr<const DocumentSamples::Round> DocumentSamples::round(std::int64_t index) const {
  if (!options_.shuffle) index = 0;  // all rounds are the same
  return rounds_.get(index, [&] { return make_round(index); });
}

std::shared_ptr<const DocumentSamples::Round> DocumentSamples::make_round(std::int64_t index) const {
  auto out = std::make_shared<Round>();
  order(*out, index);
  std::int64_t tokens = 0;
  for (const std::uint32_t row : out->rows) {
    out->tokens.push_back(tokens);
    for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i)
      tokens += places_of(pieces_[out->pieces[ranks_[i]]]);
  }
  return out;
}

void DocumentSamples::order(Round& out, std::int64_t index) const {
  out.pieces.resize(pieces_.size());
  out.rows.resize(starts_.size() - 1);
  std::iota(out.pieces.begin(), out.pieces.end(), 0u);
  std::iota(out.rows.begin(), out.rows.end(), 0u);
  LegacyRandom random(static_cast<std::uint32_t>(options_.seed + static_cast<std::uint64_t>(index)));
  if (options_.shuffle) random.shuffle(std::span(out.pieces));
  std::stable_sort(out.pieces.begin(), out.pieces.end(), [&](std::uint32_t a, std::uint32_t b) {
    return places_of(pieces_[a]) > places_of(pieces_[b]);
  });
  if (options_.shuffle) {
    random.shuffle(std::span(out.rows));
    return;
  }
  // By the first of their documents, so that a part of the rows is like the others.
  const auto first = [&](std::uint32_t row) {
    std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
    for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i)
      least = std::min(least, out.pieces[ranks_[i]]);
    return least;
  };
  std::vector<std::uint32_t> firsts(out.rows.size());
  std::transform(out.rows.begin(), out.rows.end(), firsts.begin(), first);
  std::sort(out.rows.begin(), out.rows.end(), [&](auto a, auto b) { return firsts[a] < firsts[b]; });
}

/// Calls visit(sequence, offset, tokens) for the pieces of a row, in order: how many tokens are read.
template <class Visit>
void DocumentSamples::for_each_piece(std::int64_t position, Visit&& visit) const {
  require(position >= 0, "sample position ", position);
  const auto at = round(position / samples_per_round());
  const std::uint32_t row = at->rows[static_cast<std::size_t>(position % samples_per_round())];
  for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i) {
    const DocumentPiece& piece = pieces_[at->pieces[ranks_[i]]];
    visit(range_.begin + piece.sequence, piece.chunk * room(), places_of(piece) - options_.prompt.count);
  }
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
