#pragma once

#include "data/templates/written_conversation.h"

namespace sherd::data {

/// Behind what ends an answer that ends at `at`, the token or the text that does; else `at`.
std::size_t behind_end(std::string_view text, std::size_t at, const std::vector<Control>& controls,
                       const AnswerEnd& end);

/// Where the answers of a conversation that are learned stand in `text`, what the template writes of it: from
/// behind what asks for one, with what the template has the model write in front, up to what ends it. Throws
/// Error{data} for one that cannot be found.
std::vector<jinja::Generated> find_answers(WrittenConversation& written, const TemplateRun& by,
                                           const std::vector<ChatMessage>& messages, std::string_view text,
                                           const std::vector<Control>& controls, const AnswerEnd& end);

/// The first message of whose text nothing is written; nothing where all are, or nobody can tell.
std::optional<std::size_t> dropped_message(const WrittenConversation& written);

}  // namespace sherd::data
