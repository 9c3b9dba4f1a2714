#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/templates/chat_template.h"

namespace sherd::cli {

/// A text to continue, or a conversation to answer.
struct Prompt {
  std::string text;                      ///< "prompt"
  data::Conversation conversation;       ///< or "messages" and the keys beside them; none: it is a text
  std::string place;                     ///< file and line, for errors
  std::optional<std::string> pair = {};  ///< "text_pair": the other text of a pair
  std::vector<std::string> words = {};   ///< "tokens": a text that is split into words
};

/// The prompts of a file, read as data::TextSource reads (gzip and zstd, too): a name that ends in .jsonl
/// holds a JSON object with a string "prompt" or a list "messages" in each line, any other a prompt in each
/// line. Of `texts`, which are not continued, lines may have "text" in the place of "prompt", a second one,
/// "text_pair", and a list of words, "tokens", beside the text or in its place. Empty lines hold none. Throws
/// Error{io} where it cannot be read, Error{data} that names the line for one that is no such object, and for
/// a file without prompts.
std::vector<Prompt> read_prompts(const std::filesystem::path& path, bool texts = false);

/// A word's likeliest label; empty where the word has no token, or lies behind what the model takes.
struct WordLabel {
  std::string word, label;
  double probability = 0;
};

/// A prompt's completion, its embedding, its labels, or those of its words.
struct Completion {
  std::string text = {};
  std::size_t tokens = 0;
  const char* finish = "length";      ///< or "stop": a stop string or an end-of-text id came
  std::vector<float> embedding = {};  ///< not empty: there is no completion
  std::vector<std::pair<std::string, double>> labels = {};  ///< likewise; with their probabilities
  std::optional<std::vector<WordLabel>> words = {};         ///< likewise
};

/// Writes completions as lines of JSON, {"prompt" or "messages", "completion", "tokens", "finish"},
/// {"prompt", "tokens", "embedding"}, {"prompt", "tokens", "label", "probabilities"} or {"prompt", "tokens",
/// "words": [{"word", "label", "probability"}, …]}, in the order of the prompts, each as soon as all before
/// it are there.
class CompletionsFile {
 public:
  /// An empty path: stdout. Replaces the file. Throws Error{io}.
  CompletionsFile(const std::filesystem::path& path, const std::vector<Prompt>& prompts);
  /// Throws Error{io}.
  void add(std::size_t prompt, Completion completion);

 private:
  std::ostream& out() { return path_.empty() ? stdout_ : file_; }

  std::filesystem::path path_;
  const std::vector<Prompt>& prompts_;
  std::ofstream file_;
  std::ostream& stdout_;
  std::map<std::size_t, Completion> waiting_;
  std::size_t next_ = 0;
};

}  // namespace sherd::cli
