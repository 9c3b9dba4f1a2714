#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/random.h"
#include "data/packing/samples.h"

namespace sherd::data {

class Tokenizer;

/// Ids that a vocabulary has for spans behind its own tokens where it does not name them, as T5's has.
inline constexpr std::int64_t most_spans = 100;

/// How spans of a text are cut out, for an encoder to read what is left and a decoder to write them.
struct SpanOptions {
  double density = 0.15;    ///< (0, 1): the share of tokens that are cut out
  double mean_length = 3;   ///< ≥ 1: tokens of a span, on average
  std::int64_t source = 0;  ///< places of the encoder in a row, all of which are taken
  std::int64_t places = 0;  ///< of a row: the encoder's, then the decoder's
  std::uint64_t seed = 1234;
  std::int32_t start = 0;                 ///< the token that begins the decoder's text
  std::int32_t end = 0;                   ///< the token that ends both texts
  std::vector<std::int32_t> sentinels{};  ///< of the first span, of the second, …
};

/// Lengths that a text is cut into, of its places.
struct SpanLengths {
  std::int64_t tokens = 0;  ///< of the text
  std::int64_t noise = 0;   ///< tokens among these that are cut out
  std::int64_t spans = 0;
  std::int64_t source() const {
    return tokens - noise + spans + 1;
  }                                                          ///< what is left, a sentinel each, the end
  std::int64_t target() const { return noise + spans + 1; }  ///< a sentinel before each span, and the end
};

/// The longest text of which no more than `source` places are left (compute_input_and_target_lengths() of the
/// T5 library). Throws Error{config} for a source in which no token would be left, or whose places they do
/// not fill, as where most tokens are cut out in short spans.
SpanLengths span_lengths(std::int64_t source, double density, double mean_length);

/// The ids of a tokenizer's "<extra_id_0>", "<extra_id_1>" …; of one that names none the last of 100 ids
/// behind its own, the one before, …. Throws Error{config} for fewer than `spans`, or beyond vocab_size.
std::vector<std::int32_t> sentinels_of(const Tokenizer& tokenizer, std::int64_t vocab_size,
                                       std::int64_t spans);

/// Samples of which spans are cut out, by T5's recipe (Raffel et al. 2020, 3.1.4; random_spans_noise_mask()
/// of its library): as many tokens and as many spans of each sample, at places and of lengths that all have
/// the same chance, the first behind a token that stays. A row has the text with a sentinel in each span's
/// place, and the end; then the start, each span behind its sentinel, and the end but for its last token.
/// Labels are the decoder's next tokens. What is cut out is a function of the seed and of the position.
class SpanSamples final : public Samples {
 public:
  /// `samples` have span_lengths().tokens tokens each. Throws Error{config} where the places behind the
  /// source do not hold a target.
  SpanSamples(std::shared_ptr<const Samples> samples, SpanOptions options);

  std::int64_t seq_length() const override { return options_.places; }
  std::int64_t tokens() const override { return samples_->tokens() / lengths_.tokens * filled(); }
  std::int64_t tokens_before(std::int64_t position) const override { return position * filled(); }
  std::int64_t samples_per_round() const override { return samples_->samples_per_round(); }
  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override { samples_->will_need(position); }

 private:
  std::int64_t filled() const { return lengths_.source() + lengths_.target(); }

  std::shared_ptr<const Samples> samples_;
  SpanOptions options_;
  SpanLengths lengths_;
};

}  // namespace sherd::data
