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

/// Which answer a text ends with, among answers that people compared or judged.
enum class Side : std::uint8_t { none, chosen, rejected };

/// A text of a line.
struct Example {
  std::vector<TextSegment> segments;
  bool marked = false;        ///< a conversation or completion, of which a part alone is to be learned
  bool conversation = false;  ///< written down by the template
  Side side = Side::none;
  bool teaches() const;  ///< something is to be learned
};

/// Reads one line, a JSON object, which is one text, or several with sides: see below. A conversation is
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
/// completion and the end of the document; of a conversation, the parts that render() names.
///
/// Preferences are
/// - `chosen` and `rejected`, two answers to `prompt`, or to what `messages`, `conversations` or
///   `instruction` say; or without these two texts, or lists of messages, that begin alike, which is then the
///   prompt;
/// - `prompt` and `completions` or `responses`, a list from the best to the worst, or with `ranks` (1 is the
///   best) or `scores` (the highest is); each answer forms a pair with each that is worse;
/// - `label`, true or false, beside `prompt` and `completion` or `response`, or beside `messages`, whose last
///   answer it is of (KTO's).
/// Their texts come in pairs, chosen and rejected, or alone with a label. Prompts and answers are texts, or
/// messages, one or a list of them; answers alone are to be learned.
///
/// Throws Error{data} naming file, line and cause.
std::vector<Example> read_examples(const std::string& line, const ExampleOptions& options,
                                   const std::filesystem::path& file, std::int64_t line_number);

/// The texts of the segments, without the template's own tokens.
std::string text_of(const Example& example);

/// A conversation as the template writes it down. Throws Error{config} where there is none.
Example conversation_example(const Conversation& conversation, const ExampleOptions& options);
/// A prompt that an answer goes on with.
Example completion_example(const std::string& prompt, const std::string& answer,
                           const ExampleOptions& options);

/// The conversation of such a line. Throws as read_examples(), also where the line has none.
Conversation read_conversation(const std::string& line, const std::filesystem::path& file,
                               std::int64_t line_number);

}  // namespace sherd::data
