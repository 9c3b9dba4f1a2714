#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "data/templates/conversation.h"

// Conversations as lines of JSON hold them.
namespace sherd::data {

using Json = nlohmann::ordered_json;

/// Adds the messages of a list, each an object with `role` and `content`, a text or a list of parts of text;
/// `weight` (0 or 1), `train` and `loss` (true or false) tell whether an answer is to be learned. What else
/// it has, and is not empty, goes to ChatMessage::beside. `learned`: false, and none is. Throws Error{data}.
void append_messages(const Json& list, bool learned, std::vector<ChatMessage>& messages);

/// What stands beside the messages and is for the template: tools, functions, documents, and each of
/// chat_template_kwargs.
jinja::Dict names_beside(const Json& object);

/// The conversation that an object is, or nothing where its keys are others:
/// - `messages`, or `conversations` with such messages (OpenAI's);
/// - `conversations` of `from` and `value` (ShareGPT's), with `system`;
/// - `instruction` and `output` (Alpaca's), with `input` behind the instruction and a line's end, `system`,
///   and `history`, a list of pairs of texts.
/// Throws Error{data} naming what is wrong.
std::optional<Conversation> conversation_in(const Json& object);

}  // namespace sherd::data
