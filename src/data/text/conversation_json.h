#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/templates/conversation.h"

// Conversations in the objects of .jsonl files, of which form ever; an Object is nlohmann's ordered_json. All
// throw Error{data} that says what is wrong, without the place.
namespace sherd::data {

/// There is something under a key, and not null.
template <class Object>
bool has(const Object& object, const char* key);

/// The text under a key; empty where there is none.
template <class Object>
std::string text_at(const Object& object, const char* key);

/// A message: `role` and `content`, or ShareGPT's `from` and `value`. `learned`: false, and it is not to be
/// learned, whatever it says itself.
template <class Object>
ChatMessage message_in(const Object& object, bool learned);

/// Appends the messages of a list.
template <class Object>
void append_messages(const Object& list, bool learned, std::vector<ChatMessage>& messages);

/// The values beside the messages that are for the template.
template <class Object>
jinja::Dict names_beside(const Object& object);

/// The conversation that an object is, as read_examples() says, or nothing where its keys are others.
template <class Object>
std::optional<Conversation> conversation_in(const Object& object);

/// The messages before answers that stand elsewhere in the object: `messages`, `conversations`, or
/// `instruction` with what belongs to it. None of them is to be learned.
template <class Object>
std::vector<ChatMessage> asked_in(const Object& object);

}  // namespace sherd::data
