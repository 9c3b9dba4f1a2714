#include "data/packing/preference_samples.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {

PreferenceSamples::PreferenceSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                                     PreferenceOptions options, const std::string& what)
    : dataset_(std::move(dataset)), range_(range), options_(options) {
  require(
      range.begin >= 0 && range.begin % 2 == 0 && range.size() % 2 == 0 && range.end <= dataset_->sequences(),
      "sequences ", range.begin, " to ", range.end, " of ", dataset_->sequences(), " in pairs");
  require(!options.mismatched || (!options.pairs && !options.whole),
          "mismatched answers are of texts by themselves");
  const std::int64_t least = options.packed && options.pairs ? 2 : 1;
  if (options.seq_length < least)
    fail(ErrorKind::config, "the sequence length must be at least ", least, ", not ", options.seq_length);
  find_items();
  if (items_.empty())
    fail(ErrorKind::data, "the ", what, " of '", dataset_->prefix(), "' has no ",
         options.pairs ? "pair of answers" : "answer", " to learn from in ",
         counted(range.size() / 2, "line"), left_out_ > 0 ? " whose answers fit model.seq_length" : "",
         "; give it a larger part in data.split, or prepare more");
  if (options_.packed)
    packing_.emplace(
        items_.size(), [this](std::uint32_t item) { return length_of(item); },
        [this](std::uint32_t item) { return own_length(item); }, options_.seq_length, options_.seed,
        options_.shuffle);
  else
    rounds_.emplace(items_.size(), options_.seed, options_.shuffle,
                    [this](std::uint32_t item) { return own_length(item); });
}

/// One that is there, and empty, has an end to be learned.
bool PreferenceSamples::is_absent(std::int64_t sequence) const {
  if (dataset_->length(sequence) > 1) return false;
  std::uint8_t learned = 0;
  dataset_->read_mask(sequence, 0, std::span(&learned, 1));
  return learned == 0;
}

bool PreferenceSamples::has_target(std::int64_t sequence, std::int64_t places) const {
  std::vector<std::uint8_t> targets(
      static_cast<std::size_t>(std::max<std::int64_t>(0, options_.whole ? places - 1 : places)));
  dataset_->read_mask(sequence, 1, targets);
  return std::find(targets.begin(), targets.end(), 1) != targets.end();
}

void PreferenceSamples::find_items() {
  for (std::int64_t sequence = range_.begin; sequence < range_.end; sequence += rows_of_item()) {
    const bool there = !is_absent(sequence), other = options_.pairs && !is_absent(sequence + 1);
    if (!there && !other) continue;
    if (options_.pairs && there != other)
      fail(ErrorKind::data, "'", dataset_->prefix(),
           "' has answers that are judged by themselves, which training.objective \"kto\" learns, and no "
           "pairs of them");
    const Places places = places_of(sequence);
    if (!has_target(sequence, places.chosen) || (other && !has_target(sequence + 1, places.rejected))) {
      ++left_out_;
      continue;
    }
    const std::int64_t all = own_places(sequence) + (other ? own_places(sequence + 1) : 0);
    tokens_ += places.chosen + places.rejected;
    cut_ += places.chosen + places.rejected < all;
    items_.push_back(static_cast<std::uint32_t>(sequence - range_.begin));
    if (!options_.mismatched) continue;
    std::vector<std::uint8_t> targets(static_cast<std::size_t>(dataset_->length(sequence)));
    dataset_->read_mask(sequence, 0, targets);
    prompts_.push_back(
        static_cast<std::int32_t>(std::find(targets.begin(), targets.end(), 1) - targets.begin()));
  }
}

PreferenceSamples::Places PreferenceSamples::places_of(std::int64_t sequence) const {
  const std::int64_t row = options_.seq_length, chosen = own_places(sequence);
  if (!options_.pairs) return {std::min(chosen, row), 0};
  const std::int64_t rejected = own_places(sequence + 1);
  if (!options_.packed) return {std::min(chosen, row), std::min(rejected, row)};
  const std::int64_t first = std::min(chosen, std::max(row / 2, row - rejected));
  return {first, std::min(rejected, row - first)};
}

std::int64_t PreferenceSamples::own_length(std::uint32_t item) const {
  const Places places = places_of(sequence_of(item));
  return places.chosen + places.rejected;
}

std::int64_t PreferenceSamples::length_of(std::uint32_t item) const {
  const std::int64_t own = own_length(item);
  if (!options_.mismatched) return own;
  const std::uint32_t other = partner(item);
  const std::int64_t answer = dataset_->length(sequence_of(other)) - prompts_[other];
  return std::max(own, std::min(prompts_[item] + answer - 1, options_.seq_length));
}

std::uint32_t PreferenceSamples::partner(std::uint32_t item) const {
  const std::size_t all = items_.size();
  return static_cast<std::uint32_t>((item + std::max<std::size_t>(1, all / 2)) % all);
}

double PreferenceSamples::filled() const {
  return static_cast<double>(tokens_) / static_cast<double>(samples_per_round() * options_.seq_length);
}

std::int64_t PreferenceSamples::samples_per_round() const {
  return packing_ ? packing_->rows() : items() * rows_of_item();
}

std::int64_t PreferenceSamples::tokens_before(std::int64_t position) const {
  if (packing_) return packing_->places_before(position);
  const std::int64_t item = position / rows_of_item();
  const bool second = position % rows_of_item() != 0;
  return rounds_->tokens_before(item) + (second ? places_of(sequence_of(rounds_->at(item))).chosen : 0);
}

std::vector<std::uint32_t> PreferenceSamples::items_at(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  std::vector<std::uint32_t> out;
  if (packing_) {
    packing_->for_each_item(position, [&](std::uint32_t item) { out.push_back(item); });
    return out;
  }
  return {rounds_->at(position / rows_of_item())};
}

std::vector<PreferenceSamples::Text> PreferenceSamples::texts_at(std::int64_t position) const {
  std::vector<Text> out;
  for (const std::uint32_t item : items_at(position)) {
    const std::int64_t sequence = sequence_of(item);
    const Places places = places_of(sequence);
    const bool rejected = !packing_ && options_.pairs && position % 2 == 1;
    if (!rejected) out.push_back({sequence, places.chosen});
    if (options_.pairs && (packing_ || rejected)) out.push_back({sequence + 1, places.rejected});
  }
  return out;
}

void PreferenceSamples::read(std::int64_t sequence, std::int64_t from, std::int64_t to,
                             std::vector<std::int32_t>& ids, std::vector<std::uint8_t>& targets) const {
  const std::size_t before = ids.size(), count = static_cast<std::size_t>(to - from);
  ids.resize(before + count), targets.resize(before + count);
  const auto own = std::span(ids).subspan(before);
  dataset_->read(sequence, from, own);
  if (options_.vocab_size > 0) dataset_->check_ids(own, sequence, from, options_.vocab_size);
  dataset_->read_mask(sequence, from, std::span(targets).subspan(before));
}

void PreferenceSamples::begin_row(SampleRow& row) const {
  const auto length = static_cast<std::size_t>(options_.seq_length);
  row.tokens.assign(length, options_.padding);
  row.labels.assign(length, no_label);
  row.types.clear(), row.ends.clear(), row.sides.clear(), row.texts.clear();
}

void PreferenceSamples::append(SampleRow& row, std::size_t at, const std::vector<std::int32_t>& ids,
                               const std::vector<std::uint8_t>& targets, std::int64_t sequence) const {
  const std::size_t places = ids.size() - (options_.whole ? 0 : 1);
  if (options_.whole) {
    std::copy(ids.begin(), ids.end(), row.tokens.begin() + static_cast<std::ptrdiff_t>(at));
    row.labels[at + places - 1] = ids.back();
  } else {
    write_text({}, ids, targets, std::span(row.tokens).subspan(at, places),
               std::span(row.labels).subspan(at, places));
  }
  if (packing_) row.ends.push_back(static_cast<std::int32_t>(at + places));
  row.sides.push_back(side_of(sequence));
  row.texts.push_back(static_cast<std::int32_t>(options_.first_text + sequence));
}

void PreferenceSamples::end_row(SampleRow& row, std::size_t used) const {
  const std::size_t length = row.tokens.size();
  row.filling = static_cast<std::int32_t>(length - used);
  if (!packing_ || used == length) return;
  row.ends.push_back(static_cast<std::int32_t>(length));
  row.sides.push_back(0), row.texts.push_back(-1);
}

void PreferenceSamples::load(std::int64_t position, SampleRow& row) const {
  begin_row(row);
  std::size_t used = 0;
  for (const Text& text : texts_at(position)) {
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> targets;
    read(text.sequence, 0, text.places + (options_.whole ? 0 : 1), ids, targets);
    append(row, used, ids, targets, text.sequence);
    used += static_cast<std::size_t>(text.places);
  }
  end_row(row, used);
}

void PreferenceSamples::load_mismatched(std::int64_t position, SampleRow& row) const {
  require(options_.mismatched, "rows without mismatched answers");
  begin_row(row);
  std::size_t used = 0;
  for (const std::uint32_t item : items_at(position)) {
    const std::uint32_t other = partner(item);
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> targets;
    read(sequence_of(item), 0, prompts_[item], ids, targets);
    read(sequence_of(other), prompts_[other], dataset_->length(sequence_of(other)), ids, targets);
    const auto most = static_cast<std::size_t>(options_.seq_length + 1);
    if (ids.size() > most) ids.resize(most), targets.resize(most);
    if (ids.size() < 2) {  // nothing, in front of nothing
      if (!packing_) row.sides.push_back(0), row.texts.push_back(-1);
      continue;
    }
    append(row, used, ids, targets, sequence_of(item));
    used += ids.size() - 1;
  }
  end_row(row, used);
}

void PreferenceSamples::will_need(std::int64_t position) const {
  for (const Text& text : texts_at(position)) dataset_->will_need(text.sequence, 0, text.places);
}

}  // namespace sherd::data
