#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace sherd::data {

/// How a line with labels is read: a text, or a pair of texts, with its own, or a list of words with one of
/// each.
struct LabelledOptions {
  /// Empty: "text" and "label", of words "tokens" and "labels".
  std::string text_field, label_field;
  std::string pair_field = "text_pair";
  std::vector<std::string> labels;  ///< names of the classes, in order; not empty
};

/// A text, or a pair of texts, with its class, an index of the names.
struct LabelledExample {
  std::string text;
  std::optional<std::string> pair;
  std::int32_t label = 0;
};

/// Words with their classes, -1 where one has none.
struct LabelledWords {
  std::vector<std::string> words;
  std::vector<std::int32_t> labels;
};

/// Whether a line has a list of words in the place of a text; nothing: it is no JSON object.
std::optional<bool> has_words(const std::string& line, const LabelledOptions& options);

/// Reads one line, a JSON object; its label is a name or a number of LabelledOptions::labels. Throws
/// Error{data} naming file, line and cause.
LabelledExample read_labelled(const std::string& line, const LabelledOptions& options,
                              const std::filesystem::path& file, std::int64_t line_number);

/// Likewise of words, where null and -100 are no label.
LabelledWords read_labelled_words(const std::string& line, const LabelledOptions& options,
                                  const std::filesystem::path& file, std::int64_t line_number);

/// A text as classifiers read it, [begin] text [end], or a pair, [begin] text [end] other [end].
std::vector<std::int32_t> encode_parts(const Tokenizer& tokenizer, const std::string& text,
                                       const std::optional<std::string>& pair);

/// Words as one text.
struct EncodedWords {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> first;  ///< where each word begins among these; -1: it has no token
};

/// [begin] words [end], each word encoded as a text by itself, as transformers does what is split into words
/// (is_split_into_words).
EncodedWords encode_words(const Tokenizer& tokenizer, std::span<const std::string> words);

/// The first `most` tokens of it, as cut_text() cuts: words whose first token goes have none.
void cut_words(EncodedWords& words, std::int64_t most, std::int32_t end);

/// The words between white space (of ASCII) in a text.
std::vector<std::string> words_in(const std::string& text);

}  // namespace sherd::data
