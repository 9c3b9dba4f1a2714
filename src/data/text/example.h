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
  /// The key of the text; empty: the line's keys tell: those of a conversation (conversation_in()), `prompt`
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

/// Reads one line, a JSON object. All of a text is to be learned; of a prompt with a completion, the
/// completion and the end of the document; of a conversation, the parts that render() names. Throws
/// Error{data} naming file, line and cause.
Example read_example(const std::string& line, const ExampleOptions& options,
                     const std::filesystem::path& file, std::int64_t line_number);

/// The texts of the segments, without the template's own tokens.
std::string text_of(const Example& example);

/// The conversation `messages` of such a line. Throws as read_example(), also where the line has none.
Conversation read_conversation(const std::string& line, const std::filesystem::path& file,
                               std::int64_t line_number);

/// Whether the special tokens that the texts of segments spell out are these tokens. Of conversations they
/// are not: nobody who is quoted in one can end a turn or speak for another.
enum class SpelledTokens { tokens, text };

/// Appends the ids of the segments to `ids` and, for each, 1 to `learned` where it is a target, else 0. What
/// lies between two tokens of the template is encoded as one text, as transformers does; a token that crosses
/// into a part that is learned, or out of one, is learned, too. Throws Error{data} where a text of a
/// conversation becomes a token of the template, or one that begins or ends documents, whatever is done.
void encode_segments(const Tokenizer& tokenizer, std::span<const TextSegment> segments, SpelledTokens spelled,
                     std::vector<std::int32_t>& ids, std::vector<std::uint8_t>& learned);

}  // namespace sherd::data
