#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "models/inference/score.h"

// The questions that `sherd evaluate` asks a model, and the worth of its answers.

namespace sherd::cli {

/// One line of a file of tasks.
struct TaskExample {
  std::size_t line = 0;
  std::string task;  ///< metrics are apart by it
  std::string context;
  std::vector<std::string> continuations;  ///< choices, or the one completion, or the text
  std::optional<std::size_t> answer;       ///< which choice is right; none: it is no choice
  bool is_text = false;                    ///< its likelihood is what matters
};

/// Reads JSON lines of three kinds: {"context", "choices": [...], "answer": index or text of a choice},
/// {"context", "completion"}, {"text"}; each may have a "task", by default the file's name without its
/// ending. Lines of
/// one task are of one kind. Other keys are left alone. Throws Error{io} where it cannot be read, Error{data}
/// that names the line.
std::vector<TaskExample> read_examples(const std::filesystem::path& path);

/// A context as an encoder reads it and a continuation as a decoder writes it, each with its end, as that
/// harness has them. Throws Error{data} that begins with `where` for one that is longer than its places.
models::ScoreRequest answer_to(const data::Tokenizer& tokenizer, const std::string& context,
                               const std::string& continuation, const config::Model& model,
                               const std::string& where);

/// The windows of a continuation behind its context, as the common evaluation harness (lm-evaluation-harness
/// 0.4.13, TemplateLM) encodes them: white space at the context's end belongs to what follows, both are
/// encoded as one text, and what comes there behind as many tokens as the context alone has stands behind the
/// context's own. An empty context is what begins texts, else the end of a document; a continuation that
/// itself begins with that stands alone. Throws Error{data} where nothing is left to score.
std::vector<models::ScoreRequest> windows_of(const data::Tokenizer& tokenizer, const std::string& context,
                                             const std::string& continuation, std::int64_t max_seq);
/// The windows of a whole text behind what begins texts, else the end of a document, which the harness's
/// loglikelihood_rolling() puts in front of the tokenizer's own: a token that begins all texts counts as
/// well.
std::vector<models::ScoreRequest> text_windows(const data::Tokenizer& tokenizer, const std::string& text,
                                               std::int64_t max_seq);

/// A metric of a task.
struct Metric {
  std::string name;
  double value = 0;
  std::optional<double> error;  ///< the standard error of a mean over examples
};

/// A model's scores of an example.
struct Verdict {
  std::vector<models::Score> scores;  ///< one for each continuation
  std::size_t choice = 0;             ///< the likeliest, and below the likeliest by length in characters
  std::size_t choice_by_length = 0;
};
Verdict judge(const TaskExample& example, std::vector<models::Score> scores);

/// Adds up what verdicts of one kind of example in one task say.
class TaskMetrics {
 public:
  void add(const TaskExample& example, const Verdict& verdict);
  /// A document of which tokens are known alone.
  void add_document(const models::Score& score) { ++examples_, add_tokens(score); }
  std::int64_t examples() const { return examples_; }
  std::int64_t tokens() const { return tokens_; }
  /// For choices: acc, acc_norm (by likelihood per character). For completions: acc (no token is likelier
  /// than any of its), perplexity (of examples: exp of the mean of -log p). For texts: word_perplexity,
  /// byte_perplexity, bits_per_byte. For all: token_perplexity, and loss in nats per token.
  std::vector<Metric> metrics() const;

 private:
  void add_tokens(const models::Score& score) {
    likelihood_ += score.log_likelihood, tokens_ += score.tokens;
  }

  std::int64_t examples_ = 0, tokens_ = 0, words_ = 0, bytes_ = 0;
  std::int64_t choices_ = 0, right_ = 0, right_by_length_ = 0;
  std::int64_t completions_ = 0, greedy_ = 0;
  double likelihood_ = 0;
};

}  // namespace sherd::cli
