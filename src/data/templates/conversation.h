#pragma once

#include <string>
#include <vector>

#include "data/jinja/value.h"

namespace sherd::data {

/// One message of a conversation.
struct ChatMessage {
  std::string role;  ///< system, user, assistant, or another that a template knows
  std::string content;
  /// False for an assistant's message from which nothing is to be learned (OpenAI's `"weight": 0`).
  bool learned = true;
  /// All else that it has, by name: tool_calls, reasoning_content, …; also `content`, where that is a list of
  /// parts, whose texts are `content` together, or nothing at all.
  jinja::Dict beside = {};
};

/// The message as a template gets it: its role, its content, and what else it has.
jinja::Value value_of(const ChatMessage& message);

/// The input of a template.
struct Conversation {
  std::vector<ChatMessage> messages;
  /// Further variables of the template, by name: tools, documents, and whatever else may be set
  /// (enable_thinking).
  jinja::Dict names = {};
};

}  // namespace sherd::data
