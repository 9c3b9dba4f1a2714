#include "data/packing/packing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/packing/legacy_random.h"

namespace sherd::data {
namespace {

constexpr std::int64_t stride = 64;  // sequences per entry of the running sum

}  // namespace

void Samples::load_mismatched(std::int64_t /*position*/, SampleRow& /*row*/) const {
  fail(ErrorKind::usage, "these samples have no mismatched answers");
}

std::vector<SequenceRange> split_sequences(std::int64_t sequences, std::span<const double> fractions) {
  std::vector<SequenceRange> ranges;
  double sum = 0;
  std::int64_t begin = 0;
  for (const double fraction : fractions) {
    if (!(fraction >= 0)) fail(ErrorKind::config, "data.split: the fraction ", fraction, " is negative");
    sum += fraction;
    if (sum > 1 + 1e-9) fail(ErrorKind::config, "data.split: the fractions sum to ", sum, ", more than 1");
    const double bound = std::nearbyint(std::min(sum, 1.0) * static_cast<double>(sequences));
    const std::int64_t end = std::min(sequences, static_cast<std::int64_t>(bound));
    ranges.push_back({begin, end});
    begin = end;
  }
  if (!(sum > 0)) fail(ErrorKind::config, "data.split: the fractions are all 0");
  return ranges;
}

void write_text(const VirtualTokens& prompt, std::span<const std::int32_t> ids,
                std::span<const std::uint8_t> targets, std::span<std::int32_t> tokens,
                std::span<std::int32_t> labels) {
  const auto count = static_cast<std::size_t>(prompt.count);
  require(!ids.empty() && targets.size() == ids.size() && tokens.size() == count + ids.size() - 1 &&
              labels.size() == tokens.size(),
          "a text of ", ids.size(), " tokens behind ", count, " virtual ones in ", tokens.size(), " places");
  std::iota(tokens.begin(), tokens.begin() + prompt.count, static_cast<std::int32_t>(prompt.first));
  std::copy(ids.begin(), ids.end() - 1, tokens.begin() + prompt.count);
  std::fill(labels.begin(), labels.end(), no_label);
  for (std::size_t i = count > 0 ? 0 : 1; i < ids.size(); ++i)
    if (targets[i] != 0) labels[count + i - 1] = ids[i];
}

void end_text(std::vector<std::int32_t>& ids, std::int32_t end) {
  if (ids.empty() || ids.back() != end) ids.push_back(end);
}

void cut_text(std::vector<std::int32_t>& ids, std::int64_t most, std::int32_t end) {
  if (std::ssize(ids) <= most) return;
  ids.resize(static_cast<std::size_t>(most));
  ids.back() = end;
}

std::int64_t text_tokens(std::int64_t ids, Targets targets) {
  switch (targets) {
    case Targets::tokens:
      return ids;
    case Targets::token_classes:
      return ids / 2;
    default:
      return ids - 1;
  }
}

void read_token_classes(const IndexedDataset& dataset, std::int64_t sequence, std::span<std::int32_t> out) {
  const std::int64_t tokens = text_tokens(dataset.length(sequence), Targets::token_classes);
  dataset.read(sequence, tokens, out);
  for (std::int32_t& each : out) each = each > 0 ? each - 1 : no_label;
  if (std::ssize(out) < tokens) out.back() = no_label;
}

std::vector<std::int32_t> types_of_parts(std::span<const std::int32_t> ids, std::int32_t end) {
  std::vector<std::int32_t> types(ids.size(), 0);
  const auto first = std::find(ids.begin(), ids.end(), end);
  if (first != ids.end()) std::fill(types.begin() + (first - ids.begin()) + 1, types.end(), 1);
  return types;
}

ShuffledRounds::ShuffledRounds(std::size_t samples, std::uint64_t seed, bool shuffle,
                               std::function<std::int64_t(std::uint32_t)> tokens_of)
    : samples_(static_cast<std::int64_t>(samples)),
      seed_(seed),
      shuffle_(shuffle),
      tokens_of_(std::move(tokens_of)) {}

std::shared_ptr<const ShuffledRounds::Round> ShuffledRounds::round(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  const std::int64_t index = shuffle_ ? position / samples_ : 0;  // else all rounds are the same
  return rounds_.get(index, [&] {
    auto out = std::make_shared<Round>();
    out->order.resize(static_cast<std::size_t>(samples_));
    std::iota(out->order.begin(), out->order.end(), 0u);
    LegacyRandom random(static_cast<std::uint32_t>(seed_ + static_cast<std::uint64_t>(index)));
    if (shuffle_) random.shuffle(std::span(out->order));
    out->tokens.push_back(0);
    for (const std::uint32_t i : out->order) out->tokens.push_back(out->tokens.back() + tokens_of_(i));
    return out;
  });
}

std::uint32_t ShuffledRounds::at(std::int64_t position) const {
  return round(position)->order[static_cast<std::size_t>(position % samples_)];
}

std::int64_t ShuffledRounds::tokens_before(std::int64_t position) const {
  const auto at = round(position);
  return position / samples_ * at->tokens.back() + at->tokens[static_cast<std::size_t>(position % samples_)];
}

struct PackedSamples::Round {
  IndexList sequences;            // empty: in the range's order
  IndexList samples;              // empty: in order
  std::vector<std::int64_t> sum;  // tokens in front of every stride-th sequence of the order
};

PackedSamples::PackedSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                             PackingOptions options, std::string what)
    : dataset_(std::move(dataset)), range_(range), options_(options) {
  require(range.begin >= 0 && range.begin <= range.end && range.end <= dataset_->sequences(), "sequences ",
          range.begin, " to ", range.end, " of ", dataset_->sequences());
  const std::int64_t s = options_.seq_length = options.seq_length - options.prompt.count;
  if (s < 1)
    fail(ErrorKind::config, "the sequence length must be at least 1, not ", options.seq_length,
         options.prompt.count > 0 ? cat(" with ", options.prompt.count, " virtual tokens") : "");
  for (std::int64_t i = range.begin; i < range.end; ++i) tokens_ += dataset_->length(i);
  if (tokens_ < s + 1)
    fail(ErrorKind::data, "the ", what, " of '", dataset_->prefix(), "' has ", counted(tokens_, "token"),
         " in ", counted(range.size(), "sequence"), ", fewer than the ", s + 1,
         " of one sample; give it a larger part in data.split, prepare more ",
         "text, or shorten the model's sequence length");
  if (options.total_samples > 0)
    epochs_ = std::max<std::int64_t>(1, (options.total_samples * s + tokens_) / tokens_);
  samples_ = (epochs_ * tokens_ - 1) / s;
  if (epochs_ > 1) {
    const std::int64_t before_last = ((epochs_ - 1) * tokens_ - 1) / s, per_epoch = (tokens_ - 1) / s;
    last_epoch_apart_ = options.total_samples - before_last < per_epoch * 4 / 5;
  }
}

PackedSamples::~PackedSamples() = default;

void PackedSamples::shuffle_round(Round& round, std::uint32_t seed) const {
  LegacyRandom random(seed);
  const std::int64_t count = range_.size();
  const std::int64_t first = last_epoch_apart_ ? epochs_ - 1 : epochs_;
  round.sequences = IndexList(range_.begin, count, epochs_);
  round.sequences.shuffle(random, 0, first * count);
  if (last_epoch_apart_) round.sequences.shuffle(random, first * count, epochs_ * count);
  const std::int64_t first_samples =
      last_epoch_apart_ ? (first * tokens_ - 1) / options_.seq_length : samples_;
  round.samples = IndexList(0, samples_);
  round.samples.shuffle(random, 0, first_samples);
  if (last_epoch_apart_) round.samples.shuffle(random, first_samples, samples_);
}

std::int64_t PackedSamples::sequence_at(const Round& round, std::int64_t place) const {
  return options_.shuffle ? round.sequences[place] : range_.begin + place % range_.size();
}

std::shared_ptr<const PackedSamples::Round> PackedSamples::make_round(std::int64_t index) const {
  auto round = std::make_shared<Round>();
  if (options_.shuffle)
    shuffle_round(*round, static_cast<std::uint32_t>(options_.seed + static_cast<std::uint64_t>(index)));
  const std::int64_t count = range_.size() * epochs_;
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i % stride == 0) round->sum.push_back(sum);
    sum += dataset_->length(sequence_at(*round, i));
  }
  return round;
}

std::shared_ptr<const PackedSamples::Round> PackedSamples::round(std::int64_t index) const {
  if (!options_.shuffle) index = 0;  // all rounds are the same
  return rounds_.get(index, [&] { return make_round(index); });
}

/// Calls visit(sequence, offset, count) for the parts that make up a sample, in order.
template <class Visit>
void PackedSamples::for_each_part(std::int64_t position, Visit&& visit) const {
  require(position >= 0, "sample position ", position);
  const auto at = round(position / samples_);
  const std::int64_t place = position % samples_;
  const std::int64_t sample = options_.shuffle ? at->samples[place] : place;
  std::int64_t token = sample * options_.seq_length, left = options_.seq_length + 1;
  const auto entry = std::upper_bound(at->sum.begin(), at->sum.end(), token) - at->sum.begin() - 1;
  token -= at->sum[static_cast<std::size_t>(entry)];
  for (std::int64_t i = entry * stride; left > 0; ++i) {
    const std::int64_t sequence = sequence_at(*at, i);
    const std::int64_t length = dataset_->length(sequence);
    if (token < length) {
      const std::int64_t count = std::min(left, length - token);
      visit(sequence, token, count);
      left -= count;
      token = 0;
    } else {
      token -= length;
    }
  }
}

void PackedSamples::load(std::int64_t position, SampleRow& row) const {
  const auto text = static_cast<std::size_t>(options_.seq_length),
             places = static_cast<std::size_t>(seq_length());
  std::vector<std::int32_t> ids(text + 1);
  std::vector<std::uint8_t> targets(ids.size(), 1);
  std::size_t at = 0;
  for_each_part(position, [&](std::int64_t sequence, std::int64_t offset, std::int64_t count) {
    const auto part = std::span(ids).subspan(at, static_cast<std::size_t>(count));
    dataset_->read(sequence, offset, part);
    if (options_.vocab_size > 0) dataset_->check_ids(part, sequence, offset, options_.vocab_size);
    if (dataset_->has_mask())
      dataset_->read_mask(sequence, offset, std::span(targets).subspan(at, part.size()));
    at += part.size();
  });
  row.tokens.resize(places), row.labels.resize(places);
  write_text(options_.prompt, ids, targets, row.tokens, row.labels);
  row.ends.clear();
}

void PackedSamples::will_need(std::int64_t position) const {
  for_each_part(position, [&](std::int64_t sequence, std::int64_t offset, std::int64_t count) {
    dataset_->will_need(sequence, offset, count);
  });
}

std::int64_t PackedSamples::sample_at(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  return options_.shuffle ? round(position / samples_)->samples[position % samples_] : position % samples_;
}

std::vector<std::int64_t> PackedSamples::sequence_order(std::int64_t index) const {
  const auto at = round(index);
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < range_.size() * epochs_; ++i) order.push_back(sequence_at(*at, i));
  return order;
}

}  // namespace sherd::data
