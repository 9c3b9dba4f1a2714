#pragma once

#include "data/templates/written_conversation.h"

namespace sherd::data {

/// The place behind the token or text that ends an answer, where one stands at `at`; else `at`.
std::size_t behind_end(std::string_view text, std::size_t at, const std::vector<Control>& controls,
                       const AnswerEnd& end);

/// The learned answers of a conversation in `text`, as the template writes it: each from behind the words
/// that ask for it, with those that the template has the model write in front, up to its end. Throws
/// Error{data} for one that cannot be found.
std::vector<jinja::Generated> find_answers(WrittenConversation& written, const TemplateRun& by,
                                           const std::vector<ChatMessage>& messages, std::string_view text,
                                           const std::vector<Control>& controls, const AnswerEnd& end);

/// The first message of whose text nothing is written; nothing where all are, or nobody can tell.
std::optional<std::size_t> dropped_message(const WrittenConversation& written);

}  // namespace sherd::data
