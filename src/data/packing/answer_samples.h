#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/packing/packing.h"

namespace sherd::data {

/// How prompts and answers lie in rows of an encoder's places and a decoder's.
struct AnswerOptions {
  std::int64_t source = 0;  ///< places of the encoder
  std::int64_t places = 0;  ///< of a row: the encoder's, then the decoder's
  std::uint64_t seed = 1234;
  bool shuffle = true;
  std::int64_t vocab_size = 0;
  std::int32_t start = 0;  ///< the token that begins the decoder's text
  std::int32_t end = 0;    ///< the token that ends both texts
  bool ended = false;      ///< the dataset's have it
};

/// Samples of one prompt and its answer each, for an encoder to read and a decoder to write. A sequence of
/// the dataset is one: its tokens before the first target are the prompt, the others the answer, of which
/// targets alone have labels. Both end with the end token, and lose what their places do not hold. Every
/// round takes them in another order.
///
/// Held in memory: 4 bytes per sequence, and per round in use 12.
class AnswerSamples final : public Samples {
 public:
  /// Throws Error{data} for a dataset without a mask, which tells prompts from answers, and for a range
  /// without answers. `what` names the range.
  AnswerSamples(std::shared_ptr<const IndexedDataset> dataset, SequenceRange range, AnswerOptions options,
                const std::string& what = "dataset");

  std::int64_t seq_length() const override { return options_.places; }
  std::int64_t tokens() const override { return tokens_; }
  std::int64_t tokens_before(std::int64_t position) const override {
    return rounds_->tokens_before(position);
  }
  std::int64_t samples_per_round() const override { return static_cast<std::int64_t>(sequences_.size()); }
  RowTraits traits() const override { return {.tells_sources = true}; }
  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;
  /// Samples whose prompt or answer loses tokens.
  std::int64_t cut() const { return cut_; }

 private:
  struct Answer {
    std::uint32_t sequence = 0;  // from the range's beginning
    std::int32_t prompt = 0;     // tokens before the answer
  };
  std::int64_t tokens_of(const Answer& answer) const;
  const Answer& at(std::int64_t position) const { return sequences_[rounds_->at(position)]; }

  std::shared_ptr<const IndexedDataset> dataset_;
  SequenceRange range_;
  AnswerOptions options_;
  std::vector<Answer> sequences_;
  std::int64_t tokens_ = 0, cut_ = 0;
  std::optional<ShuffledRounds> rounds_;
};

}  // namespace sherd::data
