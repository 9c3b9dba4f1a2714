#pragma once

#include <functional>
#include <span>
#include <vector>

#include "models/gpt.h"

namespace sherd::models {

/// How the next token is chosen.
struct Sampling {
  double temperature = 1.0;  ///< divides the logits; 0: always the likeliest token
  int top_k = 0;             ///< only among this many likeliest tokens; 0: among all
  std::int64_t ids = 0;      ///< only among the first so many ids, those that the tokenizer has; 0: among all
  RandomKey key{};           ///< token i draws element i of this stream
};

/// The token drawn from softmax(logits / temperature); of equal logits the lower id counts as likelier.
/// Throws Error{numerics} when a logit is NaN, Error{usage} for a negative temperature or top_k.
std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint64_t index);

/// Continues `prompt` by up to `max_tokens` tokens and returns those. Every token reads the last max_seq
/// tokens afresh. `on_token`, when given, sees each token as it comes and ends the text by returning false.
/// Nothing is recorded and nothing dropped out; all ranks of a sharded model call this alike. Throws
/// Error{usage} for an empty prompt.
std::vector<std::int32_t> generate(Gpt& model, autograd::Tape& tape, std::span<const std::int32_t> prompt,
                                   std::int64_t max_tokens, const Sampling& sampling,
                                   const std::function<bool(std::int32_t)>& on_token = nullptr);

}  // namespace sherd::models
