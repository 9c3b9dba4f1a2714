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
  /// What else it has, by name: tool_calls, reasoning_content, …; also `content`, where that is a list of
  /// parts, whose texts are `content` together, or nothing at all.
  jinja::Dict beside = {};
};

/// The message as a template gets it: its role, its content, and what else it has.
jinja::Value value_of(const ChatMessage& message);

/// What a template writes down.
struct Conversation {
  std::vector<ChatMessage> messages;
  /// What else the template is given, by name: tools, documents, and what else may be set (enable_thinking).
  jinja::Dict names = {};
};

}  // namespace sherd::data
