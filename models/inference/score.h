#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/inference/generate.h"

// Log-likelihoods of given texts, for evaluation.

namespace sherd::models {

/// A text whose tokens from `first` on are scored, each given all before it.
/// With an encoder in front of the decoder, the tokens before `first` are what the encoder reads, and the
/// decoder writes the others: no more of each than there are places for.
struct ScoreRequest {
  std::vector<std::int32_t> tokens;  ///< two at least, max_text() + 1 at most
  std::int64_t first = 1;            ///< in [1, tokens.size())
  std::vector<bool> counted;         ///< which of tokens [first, …) count; empty: all

  auto operator<=>(const ScoreRequest&) const = default;
};

struct Score {
  double log_likelihood = 0;  ///< the sum of log p(token | tokens before it), in nats
  std::int64_t tokens = 0;    ///< tokens that counted
  bool greedy = true;         ///< the model finds no token likelier than any of these
};

/// Windows over a text of any length, so that each of tokens [first, …) is scored once, by a model of up to
/// `seq_length` positions: the first window begins with the text, each later one scores the next seq_length
/// tokens and begins with the one before them, the last is filled up with tokens before. (The common
/// evaluation harness's rolling windows, for first = 1.) `counted`: of tokens [first, …), or empty.
std::vector<ScoreRequest> score_windows(std::span<const std::int32_t> tokens, std::int64_t first,
                                        std::int64_t seq_length, const std::vector<bool>& counted = {});

/// Data-parallel ranks that score a part of the texts each.
struct ScoreShare {
  int rank = 0, ranks = 1;
};

/// How often the tokens before ScoreRequest::first are read that several texts have alike.
enum class SharedContexts : std::uint8_t {
  read_by_each,  ///< a text's score has the bits that it has by itself, where products do not depend on rows
  read_once  ///< one pass reads them, the texts' own tokens follow in a second one, by its keys and states
};
/// Fewer alike tokens than this do not pay for a pass of their own.
inline constexpr std::int64_t least_shared_context = 32;

/// Scores texts, behind the model's virtual tokens if it has any, in batches of like lengths, of up to
/// `most_rows` rows, or one text, or four that share a context. But for rounding, a text's score does not
/// depend on the others; texts that are the same are scored once. Of several ranks each gives the scores of
/// its share, and 0 tokens for all other texts; all run as many passes. All ranks of a sharded model call it
/// alike. Throws Error{usage} for a request that is not as it says, Error{data} for an id outside the
/// vocabulary. `told` hears after each pass how many texts are through, on all ranks. `contexts`: an
/// encoder's are read by each text in any case.
std::vector<Score> score_texts(Gpt& model, const RunPass& run, std::span<const ScoreRequest> texts,
                               std::int64_t most_rows, ScoreShare share = {},
                               const std::function<void(std::size_t)>& told = {},
                               SharedContexts contexts = SharedContexts::read_by_each);

}  // namespace sherd::models
