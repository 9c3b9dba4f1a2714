#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/templates/chat_template.h"

namespace sherd::data {

/// How a line of a .jsonl file is read.
struct ExampleOptions {
  /// The key of the text; empty: the line's keys tell: those of a conversation (read_example()), `prompt`
  /// with `completion` or `response` (two texts, or two lists of messages), or `text`.
  std::string text_field;
  std::optional<ChatTemplate> chat_template;  ///< that of conversations
  std::string no_template = {};               ///< why these are refused, where there is none
  /// A completion is a text of its own behind the end of its prompt, as a decoder writes it behind an
  /// encoder; else it goes on with the prompt.
  bool apart = false;
};

/// The contents of one line.
struct Example {
  std::vector<TextSegment> segments;
  bool marked = false;        ///< a conversation or completion, of which a part alone is to be learned
  bool conversation = false;  ///< written down by the template
  bool teaches() const;       ///< something is to be learned
};

/// Reads one line, a JSON object. A conversation is
/// - `messages`, each with `role` and `content`, a text or a list of parts of text, or `conversations` of
/// these;
///   `weight` (0 or 1), `train` and `loss` (true or false) tell whether an answer is to be learned;
/// - `conversations` of `from` and `value` (ShareGPT's), with `system`;
/// - `instruction` and `output` (Alpaca's), with `input` behind the instruction and a line's end, `system`,
/// and
///   `history`, a list of pairs of texts;
/// - `prompt` and `completion`, two lists of messages, of which the second is learned.
/// Beside it the template is given tools, functions, documents, and each of chat_template_kwargs.
///
/// All of a text is to be learned; of a prompt with a completion, the
/// completion and the end of the document; of a conversation, the parts that render() names. Throws
/// Error{data} naming file, line and cause.
Example read_example(const std::string& line, const ExampleOptions& options,
                     const std::filesystem::path& file, std::int64_t line_number);

/// The texts of the segments, without the template's own tokens.
std::string text_of(const Example& example);

/// The conversation of such a line. Throws as read_example(), also where the line has none.
Conversation read_conversation(const std::string& line, const std::filesystem::path& file,
                               std::int64_t line_number);

}  // namespace sherd::data
