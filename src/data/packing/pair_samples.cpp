#include "data/packing/pair_samples.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

/// Draws of a row.
enum class PairDraw : std::uint64_t { is_short, length, split, is_other, document, place };

/// One of `count` numbers, each as likely.
std::int64_t one_of(const RandomKey& random, PairDraw what, std::int64_t count) {
  return static_cast<std::int64_t>((std::uint64_t{philox(random, static_cast<std::uint64_t>(what))[0]} *
                                    static_cast<std::uint64_t>(count)) >>
                                   32);
}

bool happens(const RandomKey& random, PairDraw what, double chance) {
  return uniform_at(random, static_cast<std::uint64_t>(what)) < static_cast<float>(chance);
}

}  // namespace

PairSamples::PairSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                         PairOptions options, const std::string& what)
    : dataset_(std::move(dataset)),
      range_(range),
      options_(std::move(options)),
      fingerprint_(dataset_->fingerprint()) {
  require(range.begin >= 0 && range.begin <= range.end && range.end <= dataset_->sequences(), "sequences ",
          range.begin, " to ", range.end, " of ", dataset_->sequences());
  if (room() < 2)
    fail(ErrorKind::config, "a row of ", options_.seq_length,
         " tokens does not hold a pair of texts and the three tokens around them: raise model.seq_length");
  if (dataset_->documents() != dataset_->sequences())
    fail(ErrorKind::data, "'", dataset_->prefix(), "' has ", counted(dataset_->sequences(), "sequence"),
         " in ", counted(dataset_->documents(), "document"),
         ", and pairs of texts are cut out of documents of one sequence: prepare it with `sherd prepare`");
  constexpr std::int64_t most = std::numeric_limits<std::uint32_t>::max();
  for (std::int64_t sequence = range.begin; sequence < range.end; ++sequence) {
    std::int64_t text = dataset_->length(sequence);
    if (text == 0) continue;
    if (documents_.empty()) find_ends(sequence);
    text -= (begun_ ? 1 : 0) + (ended_ ? 1 : 0);
    if (text < 2) continue;
    const auto number = static_cast<std::uint32_t>(documents_.size());
    documents_.push_back(
        {static_cast<std::uint32_t>(sequence - range.begin), static_cast<std::int32_t>(text)});
    for (std::int64_t chunk = 0; text - chunk * room() >= 2; ++chunk) {
      pieces_.push_back({number, static_cast<std::uint32_t>(chunk)});
      tokens_ += places_of(pieces_.back());
    }
  }
  require(range.size() < most && std::ssize(pieces_) < most,
          "too many documents for pairs of texts: ", range.size());
  if (documents_.size() < 2)
    fail(ErrorKind::data, "the ", what, " of '", dataset_->prefix(), "' has ",
         counted(std::ssize(documents_), "document"),
         " of two tokens or more, and pairs of texts take at least two: give it a larger part in data.split, "
         "or "
         "prepare more of them");
  rounds_.emplace(pieces_.size(), options_.seed, options_.shuffle,
                  [this](std::uint32_t i) { return places_of(pieces_[i]); });
}

/// The tokenizer put the same tokens around all documents.
void PairSamples::find_ends(std::int64_t sequence) {
  std::int32_t id = 0;
  dataset_->read(sequence, 0, {&id, 1});
  begun_ = id == options_.begin;
  dataset_->read(sequence, dataset_->length(sequence) - 1, {&id, 1});
  ended_ = id == options_.end;
}

std::int64_t PairSamples::length_of(const Piece& piece) const {
  return std::min(room(), documents_[piece.document].length - piece.chunk * room());
}

PairSamples::Ids PairSamples::read(const Document& document, std::int64_t from, std::int64_t count) const {
  Ids out(static_cast<std::size_t>(count));
  const std::int64_t sequence = range_.begin + document.sequence, offset = from + (begun_ ? 1 : 0);
  dataset_->read(sequence, offset, out);
  if (options_.vocab_size > 0) dataset_->check_ids(out, sequence, offset, options_.vocab_size);
  return out;
}

bool PairSamples::begins_word(std::int32_t id) const {
  return options_.goes_on.empty() || !options_.goes_on.at(static_cast<std::size_t>(id));
}

/// So many tokens of any document but one, or all that it has, from the beginning of a word on.
PairSamples::Ids PairSamples::of_another(const RandomKey& random, std::uint32_t not_of,
                                         std::int64_t count) const {
  std::int64_t other = one_of(random, PairDraw::document, std::ssize(documents_) - 1);
  if (other >= not_of) ++other;
  const Document& from = documents_[static_cast<std::size_t>(other)];
  count = std::min<std::int64_t>(count, from.length);
  const std::int64_t last = one_of(random, PairDraw::place, from.length - count + 1);
  constexpr std::int64_t longest_word = 32;
  const std::int64_t first = std::max<std::int64_t>(0, last - longest_word);
  const Ids before = read(from, first, last - first + 1);
  const auto word =
      std::find_if(before.rbegin(), before.rend(), [&](std::int32_t id) { return begins_word(id); });
  return read(from, word == before.rend() ? last : last - (word - before.rbegin()), count);
}

void PairSamples::load(std::int64_t position, SampleRow& row) const {
  const Piece& piece = at(position);
  const RandomKey random = RandomKey{options_.seed, stable_hash("pairs of texts")}
                               .at(fingerprint_)
                               .at(static_cast<std::uint64_t>(position));
  std::int64_t most = room();
  if (happens(random, PairDraw::is_short, options_.short_share))
    most = 2 + one_of(random, PairDraw::length, room() - 1);
  Ids first = read(documents_[piece.document], piece.chunk * room(), std::min(most, length_of(piece)));
  // Between two words, if there is such a place: the next one, or else the last.
  auto cut = first.begin() + 1 + one_of(random, PairDraw::split, std::ssize(first) - 1);
  const auto word = std::find_if(cut, first.end(), [&](std::int32_t id) { return begins_word(id); });
  if (word != first.end()) {
    cut = word;
  } else {
    const auto last = std::find_if(std::make_reverse_iterator(cut), first.rend() - 1,
                                   [&](std::int32_t id) { return begins_word(id); });
    if (last != first.rend() - 1) cut = last.base() - 1;
  }
  row.sentence = happens(random, PairDraw::is_other, 0.5) ? 1 : 0;
  Ids second(cut, first.end());
  first.erase(cut, first.end());
  if (row.sentence == 1) second = of_another(random, piece.document, std::ssize(second));
  row.tokens.assign(1, options_.begin);
  row.types.assign(first.size() + 2, 0);
  row.types.resize(row.types.size() + second.size() + 1, 1);
  for (const Ids* text : {&first, &second}) {
    row.tokens.insert(row.tokens.end(), text->begin(), text->end());
    row.tokens.push_back(options_.end);
  }
  const auto places = static_cast<std::size_t>(options_.seq_length);
  row.filling = static_cast<std::int32_t>(places - row.tokens.size());
  row.ends.assign(1, static_cast<std::int32_t>(row.tokens.size()));
  if (row.filling > 0) row.ends.push_back(static_cast<std::int32_t>(places));
  row.tokens.resize(places, options_.end), row.types.resize(places, 0);
  row.labels.assign(places, no_label);
}

void PairSamples::will_need(std::int64_t position) const {
  const Piece& piece = at(position);
  dataset_->will_need(range_.begin + documents_[piece.document].sequence,
                      piece.chunk * room() + (begun_ ? 1 : 0), length_of(piece));
}

}  // namespace sherd::data
