#pragma once

#include <functional>
#include <span>
#include <vector>

#include "models/gpt.h"

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

/// A text to continue.
struct TextRequest {
  std::vector<std::int32_t> prompt;  ///< at least one token
  std::int64_t max_tokens = 0;       ///< at most so many follow
  RandomKey key{};                   ///< in the place of Sampling::key
};

/// Counts of the work that generating took.
struct GenerationStats {
  std::int64_t prompt_tokens = 0;  ///< tokens that were read, those of texts that were read again included
  std::int64_t tokens = 0;         ///< tokens that were made
  std::int64_t decoded = 0;        ///< tokens made by passes over one token of each text
  std::int64_t reread = 0;         ///< times that a text had filled seq_length and was read again
  double prefill_seconds = 0, decode_seconds = 0;
  std::int64_t prefill_passes = 0, decode_passes = 0;
  std::size_t cache_bytes = 0;  ///< keys and values on this rank
};

/// Runs what it is given on a tape that neither records nor drops out: sharding::Pass::evaluate(), for one.
using RunPass = std::function<void(const std::function<void(Tape&)>&)>;
/// Rows that a pass over prompts takes at most, but for a single longer one: activations stay small.
inline constexpr std::int64_t most_prompt_rows = 4096;

/// Told of each token of each text as it comes; false ends the text.
using OnToken = std::function<bool(std::size_t text, std::int32_t token)>;

/// Continues texts, up to `batch` at a time: a pass reads the prompts of those that begin, and each other
/// pass gives one token to all that are under way; where a text ends, the next one takes its place. A text's
/// tokens depend on its prompt, its key and `sampling` alone, not on the texts beside it.
///
/// Where a text with its continuation is longer than seq_length tokens, it is read again whenever it has
/// filled them: its last seq_length/2 tokens, from position 0 on, then grow to seq_length. (A prompt of more
/// tokens than seq_length begins with its last seq_length.) So a token sees the seq_length/2 before it at
/// least. A model's virtual tokens (GptConfig::prompt()) stand in front of all that, and max_text() is what
/// they leave.
///
/// With an encoder in front of the decoder, the encoder reads the prompt, its first encoder.seq_length
/// tokens; the decoder writes no more tokens than it has places (config::Model::target_length()).
///
/// All ranks of a sharded model call this alike, and on_token answers alike on all. Throws Error{usage} for
/// an empty prompt, a batch below 1 and what sample_token() refuses.
GenerationStats generate_texts(Gpt& model, const RunPass& run, std::span<const TextRequest> texts,
                               std::int64_t batch, const Sampling& sampling, const OnToken& on_token);

/// One text, on a tape: continues `prompt` by up to `max_tokens` tokens and returns those. `on_token`, when
/// given, sees each token as it comes and ends the text by returning false. The tape is left as it was.
std::vector<std::int32_t> generate(Gpt& model, autograd::Tape& tape, std::span<const std::int32_t> prompt,
                                   std::int64_t max_tokens, const Sampling& sampling,
                                   const std::function<bool(std::int32_t)>& on_token = nullptr);

}  // namespace sherd::models
