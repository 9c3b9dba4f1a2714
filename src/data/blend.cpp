#include "data/blend.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace sherd::data {

BlendedSamples::BlendedSamples(std::vector<std::shared_ptr<const Samples>> sources,
                               std::vector<double> weights)
    : sources_(std::move(sources)),
      choice_(static_cast<std::size_t>(cycle)),
      earlier_(static_cast<std::size_t>(cycle)),
      per_cycle_(sources_.size()) {
  require(!sources_.empty() && sources_.size() == weights.size() &&
              sources_.size() <= std::numeric_limits<std::uint16_t>::max(),
          sources_.size(), " sources and ", weights.size(), " weights");
  together_ =
      sources_.front()->traits().has_pairs && !sources_.front()->traits().keeps_documents_apart ? 2 : 1;
  for (const auto& source : sources_)
    require(source->seq_length() == seq_length(), "sources of ", seq_length(), " and ", source->seq_length(),
            " tokens a sample");
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) {
    require(weight > 0, "a weight of ", weight);
    weight /= sum;
  }
  for (std::int64_t i = 0; i < cycle; ++i) {
    const double here = std::max(static_cast<double>(i), 1.0);
    std::size_t chosen = 0;
    double furthest = -std::numeric_limits<double>::infinity();
    for (std::size_t s = 0; s < weights.size(); ++s)
      if (const double behind = weights[s] * here - static_cast<double>(per_cycle_[s]); behind > furthest)
        furthest = behind, chosen = s;
    choice_[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(chosen);
    earlier_[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(per_cycle_[chosen]++);
  }
  for (std::size_t s = 0; s < weights.size(); ++s)
    if (weights[s] * static_cast<double>(cycle) < 1)
      fail(ErrorKind::config, "data.sources: a weight is ", weights[s], " of all weights, less than one in ",
           cycle, " samples: raise it, or leave the source out");
}

std::int64_t BlendedSamples::tokens() const {
  return std::accumulate(sources_.begin(), sources_.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& source) { return sum + source->tokens(); });
}

std::int64_t BlendedSamples::tokens_before(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  const std::int64_t choice = position / together_, within = position % together_;
  std::vector<std::int64_t> samples(sources_.size());
  for (std::int64_t i = 0; i < choice % cycle; ++i)
    samples[choice_[static_cast<std::size_t>(i)]] += together_;
  samples[choice_[static_cast<std::size_t>(choice % cycle)]] += within;
  std::int64_t tokens = 0;
  for (std::size_t s = 0; s < sources_.size(); ++s)
    tokens += sources_[s]->tokens_before(choice / cycle * per_cycle_[s] * together_ + samples[s]);
  return tokens;
}

std::int64_t BlendedSamples::samples_per_round() const {
  return std::accumulate(
      sources_.begin(), sources_.end(), std::int64_t{0},
      [](std::int64_t sum, const auto& source) { return sum + source->samples_per_round(); });
}

BlendedSamples::SourcePosition BlendedSamples::place(std::int64_t position) const {
  require(position >= 0, "sample position ", position);
  const std::int64_t choice = position / together_;
  const auto within = static_cast<std::size_t>(choice % cycle);
  const std::size_t source = choice_[within];
  const std::int64_t earlier = choice / cycle * per_cycle_[source] + earlier_[within];
  return {source, earlier * together_ + position % together_};
}

void BlendedSamples::load(std::int64_t position, SampleRow& row) const {
  const SourcePosition at = place(position);
  sources_[at.source]->load(at.position, row);
}

void BlendedSamples::load_mismatched(std::int64_t position, SampleRow& row) const {
  const SourcePosition at = place(position);
  sources_[at.source]->load_mismatched(at.position, row);
}

void BlendedSamples::will_need(std::int64_t position) const {
  const SourcePosition at = place(position);
  sources_[at.source]->will_need(at.position);
}

}  // namespace sherd::data
