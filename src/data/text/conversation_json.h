#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/templates/conversation.h"

// Conversations in the objects of .jsonl files, of which form ever. All throw Error{data} that says what is
// wrong, without the place.
namespace sherd::data {

using Json = nlohmann::ordered_json;

/// There is something under a key, and not null.
bool has(const Json& object, const char* key);

/// The text under a key; empty where there is none.
std::string text_at(const Json& object, const char* key);

/// A message: `role` and `content`, or ShareGPT's `from` and `value`. `learned`: false, and it is not to be
/// learned, whatever it says itself.
ChatMessage message_in(const Json& object, bool learned);

/// Those of a list.
void append_messages(const Json& list, bool learned, std::vector<ChatMessage>& messages);

/// What stands beside the messages and is for the template.
jinja::Dict names_beside(const Json& object);

/// The conversation that an object is, as read_examples() says, or nothing where its keys are others.
std::optional<Conversation> conversation_in(const Json& object);

/// What is said before answers that stand elsewhere in the object: `messages`, `conversations`, or
/// `instruction` with what belongs to it. Nothing of it is to be learned.
std::vector<ChatMessage> asked_in(const Json& object);

}  // namespace sherd::data
