#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/random.h"
#include "data/packing/samples.h"

namespace sherd::data {

class Tokenizer;

/// How tokens are masked for an encoder to tell them (masked language modelling).
struct MaskingOptions {
  double probability = 0.15;  ///< (0, 1): of a token, or a word, to be a target
  bool whole_words = false;   ///< the tokens of a word are targets together
  std::uint64_t seed = 1234;
  std::int64_t vocab_size = 0;
  std::int32_t mask_token = 0;
  std::vector<bool> special{};  ///< ids that are never targets: as many as vocab_size, or none
  std::vector<bool> goes_on{};  ///< ids that go on with the word before them; likewise
};

/// The ids of a tokenizer as masking asks for them: its mask token, "[MASK]" or "<mask>", its special tokens,
/// and tokens within a word ("##ing", or without the mark of a space where the vocabulary has one). Throws
/// Error{config} for a tokenizer without a mask token.
MaskingOptions masking_of(const Tokenizer& tokenizer, std::int64_t vocab_size);

/// Samples whose targets are tokens that are masked, by BERT's recipe (Devlin et al. 2019, 3.1, as
/// transformers' DataCollatorForLanguageModeling has it): each token that is not special is a target with a
/// probability; of the targets 80 % become the mask token, 10 % any token of the vocabulary, and the others
/// stay. Labels are the targets' ids, and no_label elsewhere. What is masked is a function of the seed and of
/// the position, so that each pass over the data masks other tokens, and an evaluation always the same.
class MaskedSamples final : public Samples {
 public:
  MaskedSamples(std::shared_ptr<const Samples> samples, MaskingOptions options);

  std::int64_t seq_length() const override { return samples_->seq_length(); }
  std::int64_t tokens() const override { return samples_->tokens(); }
  std::int64_t tokens_before(std::int64_t position) const override {
    return samples_->tokens_before(position);
  }
  std::int64_t samples_per_round() const override { return samples_->samples_per_round(); }
  RowTraits traits() const override {
    RowTraits out = samples_->traits();
    out.has_few_targets = true;
    return out;
  }
  void load(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override { samples_->will_need(position); }

 private:
  std::shared_ptr<const Samples> samples_;
  MaskingOptions options_;
};

}  // namespace sherd::data
