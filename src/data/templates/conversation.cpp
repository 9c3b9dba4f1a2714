#include <algorithm>

#include "data/templates/chat_template.h"
#include "data/text/segments.h"

namespace sherd::data {
namespace {

std::vector<std::int32_t> encoded(const ChatTemplate& by, const Conversation& conversation) {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> learned;
  encode_segments(by.tokenizer(), by.render_question(conversation), SpelledTokens::text, ids, learned);
  return ids;
}

/// Removes the oldest turn; false where the last question alone is left.
bool remove_turn(std::vector<ChatMessage>& messages) {
  const auto is_user = [](const ChatMessage& message) { return message.role == "user"; };
  const auto first = std::find_if(messages.begin(), messages.end(), is_user);
  if (first == messages.end()) return false;
  const auto second = std::find_if(first + 1, messages.end(), is_user);
  if (second == messages.end()) return false;
  // With it goes an answer in front of the first question; a system's text stays wherever it stands.
  messages.erase(std::remove_if(messages.begin(), second,
                                [](const ChatMessage& message) { return message.role != "system"; }),
                 second);
  return true;
}

}  // namespace

jinja::Value value_of(const ChatMessage& message) {
  jinja::Dict out{{"role", message.role}};
  const auto is_content = [](const auto& pair) { return pair.first.str() == "content"; };
  if (std::none_of(message.beside.begin(), message.beside.end(), is_content))
    out.emplace_back("content", message.content);
  out.insert(out.end(), message.beside.begin(), message.beside.end());
  return jinja::Value::dict(std::move(out));
}

Question encode_question(const ChatTemplate& by, const Conversation& conversation, std::int64_t most) {
  Question out{encoded(by, conversation)};
  Conversation rest = conversation;
  while (std::ssize(out.ids) > most && remove_turn(rest.messages)) out.ids = encoded(by, rest);
  out.left_out = conversation.messages.size() - rest.messages.size();
  return out;
}

}  // namespace sherd::data
