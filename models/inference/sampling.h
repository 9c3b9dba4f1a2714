#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace sherd::models {

/// How the next token is chosen. What is set applies in this order, as in Hugging Face's transformers:
/// repetition_penalty, temperature, top_k, top_p.
struct Sampling {
  double temperature = 1.0;         ///< divides the logits; 0: always the likeliest token
  int top_k = 0;                    ///< only among this many likeliest tokens; 0: among all
  double top_p = 1.0;               ///< and only among the likeliest that together reach this probability
  double repetition_penalty = 1.0;  ///< divides the positive logits of the text's tokens, multiplies others
  std::int64_t ids = 0;  ///< only among the first so many ids, those that the tokenizer has; 0: among all
  RandomKey key{};       ///< a text's token i draws element i of this stream
};

/// Throws Error{usage} for a setting that means nothing: a negative temperature or top_k, a top_p outside (0,
/// 1], a repetition_penalty that is not positive.
void check_sampling(const Sampling& sampling);

/// The token drawn from softmax(logits / temperature), as `sampling` says; of equal logits the lower id
/// counts as likelier. `text`: the tokens so far, which repetition_penalty looks at. Throws Error{numerics}
/// when a logit is NaN, Error{usage} as check_sampling().
std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint64_t index,
                          std::span<const std::int32_t> text = {});

}  // namespace sherd::models
