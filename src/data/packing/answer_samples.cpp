#include "data/packing/answer_samples.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {

AnswerSamples::AnswerSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range,
                             AnswerOptions options, const std::string& what)
    : dataset_(std::move(dataset)), range_(range), options_(options) {
  require(range.begin >= 0 && range.begin <= range.end && range.end <= dataset_->sequences(), "sequences ",
          range.begin, " to ", range.end, " of ", dataset_->sequences());
  require(options.source > 0 && options.source < options.places, "a row of ", options.places, " places, ",
          options.source, " of them an encoder's");
  if (!dataset_->has_mask())
    fail(ErrorKind::data, "'", dataset_->prefix(),
         "' does not tell prompts from answers, which training.objective \"seq2seq\" learns: prepare it from "
         "prompts and completions, or conversations (docs/instruction_tuning.md)");
  std::vector<std::uint8_t> targets;
  for (std::int64_t sequence = range.begin; sequence < range.end; ++sequence) {
    targets.resize(static_cast<std::size_t>(dataset_->length(sequence)));
    dataset_->read_mask(sequence, 0, targets);
    const auto first = std::find(targets.begin(), targets.end(), 1);
    if (first == targets.begin() || first == targets.end()) continue;  // nothing to read, or nothing to learn
    sequences_.push_back({static_cast<std::uint32_t>(sequence - range.begin),
                          static_cast<std::int32_t>(first - targets.begin())});
    tokens_ += tokens_of(sequences_.back());
    const std::int64_t prompt = sequences_.back().prompt, answer = std::ssize(targets) - prompt;
    const std::int64_t ends = options_.ended ? 0 : 1;
    if (prompt + ends > options_.source || answer + ends > options_.places - options_.source) ++cut_;
  }
  if (sequences_.empty())
    fail(ErrorKind::data, "the ", what, " of '", dataset_->prefix(), "' has no prompt with an answer in ",
         counted(range.size(), "sequence"), "; give it a larger part in data.split, or prepare more of them");
  rounds_.emplace(sequences_.size(), options.seed, options.shuffle,
                  [this](std::uint32_t i) { return tokens_of(sequences_[i]); });
}

/// Places that a sample takes; those of ends too, which are yet to come unless the dataset has them.
std::int64_t AnswerSamples::tokens_of(const Answer& answer) const {
  const std::int64_t all = dataset_->length(range_.begin + answer.sequence), prompt = answer.prompt,
                     ends = options_.ended ? 0 : 1;
  return std::min(prompt + ends, options_.source) +
         std::min(all - prompt + ends, options_.places - options_.source);
}

void AnswerSamples::load(std::int64_t position, SampleRow& row) const {
  const Answer& answer = at(position);
  const std::int64_t sequence = range_.begin + answer.sequence;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(dataset_->length(sequence)));
  std::vector<std::uint8_t> targets(ids.size());
  dataset_->read(sequence, 0, ids), dataset_->read_mask(sequence, 0, targets);
  if (options_.vocab_size > 0) dataset_->check_ids(ids, sequence, 0, options_.vocab_size);
  const auto ended = [&](std::vector<std::int32_t>& text, std::int64_t most) {
    end_text(text, options_.end);
    cut_text(text, most, options_.end);
  };
  row.tokens.assign(ids.begin(), ids.begin() + answer.prompt);
  ended(row.tokens, options_.source);
  row.source = static_cast<std::int32_t>(row.tokens.size());
  row.tokens.resize(static_cast<std::size_t>(options_.source), options_.end);
  std::vector<std::int32_t> target(ids.begin() + answer.prompt, ids.end());
  ended(target, options_.places - options_.source);
  row.labels.assign(row.tokens.size(), no_label);
  row.tokens.push_back(options_.start);
  row.tokens.insert(row.tokens.end(), target.begin(), target.end() - 1);
  for (std::size_t i = 0; i < target.size(); ++i) {
    const std::size_t place = static_cast<std::size_t>(answer.prompt) + i;
    row.labels.push_back(place >= targets.size() || targets[place] ? target[i] : no_label);
  }
  row.filling = static_cast<std::int32_t>(options_.places - std::ssize(row.tokens));
  row.tokens.resize(static_cast<std::size_t>(options_.places), options_.end);
  row.labels.resize(static_cast<std::size_t>(options_.places), no_label);
  row.types.clear(), row.ends.clear();
}

void AnswerSamples::will_need(std::int64_t position) const {
  const std::int64_t sequence = range_.begin + at(position).sequence;
  dataset_->will_need(sequence, 0, dataset_->length(sequence));
}

}  // namespace sherd::data
