#include "data/packing/span_samples.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace {

SpanLengths lengths_of(std::int64_t tokens, double density, double mean_length) {
  // Halves go to the even number, as in Python.
  const auto whole = [](double x) { return static_cast<std::int64_t>(std::nearbyint(x)); };
  SpanLengths out{tokens, 0, 0};
  out.noise = std::clamp<std::int64_t>(whole(static_cast<double>(tokens) * density), 1, tokens - 1);
  out.spans = std::max<std::int64_t>(1, whole(static_cast<double>(out.noise) / mean_length));
  out.spans = std::min(out.spans, tokens - out.noise);  // each stands behind a token that stays
  return out;
}

/// Lengths of `parts` parts of `items` items, one at least each; all ways have the same chance (selection
/// sampling of where parts begin: Knuth, "The art of computer programming" 2, 3.4.2, S).
std::vector<std::int64_t> parts_of(std::int64_t items, std::int64_t parts, RandomKey random) {
  std::vector<std::int64_t> out{1};
  std::int64_t wanted = parts - 1;
  for (std::int64_t i = 1; i < items; ++i) {
    const auto left = static_cast<double>(items - i);
    if (static_cast<double>(uniform_at(random, static_cast<std::uint64_t>(i))) * left <
        static_cast<double>(wanted))
      --wanted, out.push_back(1);
    else
      ++out.back();
  }
  return out;
}

}  // namespace

SpanLengths span_lengths(std::int64_t source, double density, double mean_length) {
  SpanLengths out = lengths_of(2, density, mean_length);
  if (source < out.source())
    fail(ErrorKind::config, "an encoder of ", source,
         " tokens has no room for a text of which a span is cut out: make model.encoder.seq_length ",
         out.source(), " or more");
  for (SpanLengths next = out; next.source() <= source;
       next = lengths_of(next.tokens + 1, density, mean_length))
    out = next;
  if (out.source() < source)
    fail(ErrorKind::config, "texts of which spans are cut out fill ", out.source(), " of an encoder's ",
         source, " places, and with a token more take too many: set model.encoder.seq_length to ",
         out.source());
  return out;
}

std::vector<std::int32_t> sentinels_of(const Tokenizer& tokenizer, std::int64_t vocab_size,
                                       std::int64_t spans) {
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < spans; ++i) {
    const auto named = tokenizer.token_id(cat("<extra_id_", i, ">"));
    if (!named) break;
    out.push_back(*named);
  }
  const bool names = !out.empty();
  for (std::int64_t i = 0; !names && i < std::min(spans, most_spans); ++i)
    out.push_back(static_cast<std::int32_t>(tokenizer.vocab_size() + most_spans - 1 - i));
  if (std::ssize(out) < spans)
    fail(ErrorKind::config, spans,
         " spans of a sample need as many tokens that mark them, and the tokenizer ", tokenizer.spec(),
         names ? " names " : " has room for ", out.size(),
         ": make training.span_length larger, or model.encoder.seq_length smaller");
  const std::int64_t most = *std::max_element(out.begin(), out.end());
  if (most >= vocab_size)
    fail(ErrorKind::config, "training.objective \"spans\" marks them by tokens up to ", most,
         ", and model.vocab_size is ", vocab_size, ": set it to ", most + 1, " or more (the tokenizer ",
         tokenizer.spec(), " has ", tokenizer.vocab_size(), ")");
  return out;
}

SpanSamples::SpanSamples(std::shared_ptr<const Samples> samples, SpanOptions options)
    : samples_(std::move(samples)),
      options_(std::move(options)),
      lengths_(span_lengths(options_.source, options_.density, options_.mean_length)) {
  require(samples_->seq_length() == lengths_.tokens, "samples of ", samples_->seq_length(), " tokens, where ",
          lengths_.tokens, " are cut");
  require(std::ssize(options_.sentinels) >= lengths_.spans, "a sentinel for each of ", lengths_.spans,
          " spans");
  if (options_.places < options_.source + lengths_.target())
    fail(ErrorKind::config, "an encoder of ", options_.source, " tokens reads texts of ", lengths_.tokens,
         ", of which the decoder writes ", lengths_.target(), ": set model.seq_length to ",
         options_.source + lengths_.target());
}

void SpanSamples::load(std::int64_t position, SampleRow& row) const {
  samples_->load(position, row);
  const std::vector<std::int32_t> text = std::exchange(row.tokens, {});
  const RandomKey random =
      RandomKey{options_.seed, stable_hash("spans")}.at(static_cast<std::uint64_t>(position));
  const std::vector<std::int64_t> kept = parts_of(lengths_.tokens - lengths_.noise, lengths_.spans,
                                                  random.at(0)),
                                  cut = parts_of(lengths_.noise, lengths_.spans, random.at(1));
  std::vector<std::int32_t> target;
  auto at = text.begin();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    row.tokens.insert(row.tokens.end(), at, at + kept[i]);
    at += kept[i];
    row.tokens.push_back(options_.sentinels[i]), target.push_back(options_.sentinels[i]);
    target.insert(target.end(), at, at + cut[i]);
    at += cut[i];
  }
  row.tokens.push_back(options_.end), target.push_back(options_.end);
  row.labels.assign(row.tokens.size(), no_label);
  row.labels.insert(row.labels.end(), target.begin(), target.end());
  row.tokens.push_back(options_.start);
  row.tokens.insert(row.tokens.end(), target.begin(), target.end() - 1);
  row.filling = static_cast<std::int32_t>(options_.places - filled());
  row.tokens.resize(static_cast<std::size_t>(options_.places), options_.start);
  row.labels.resize(static_cast<std::size_t>(options_.places), no_label);
  row.types.clear(), row.ends.clear();
}

}  // namespace sherd::data
