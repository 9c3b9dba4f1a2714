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
  if (std::ssize(out.ids) <= most) return out;
  const auto without = [&](std::size_t turns) {
    Conversation rest = conversation;
    for (std::size_t i = 0; i < turns; ++i) remove_turn(rest.messages);
    return rest;
  };
  std::size_t fewest = 0, enough = 0;  // turns whose removal does not suffice, and does
  for (Conversation rest = conversation; remove_turn(rest.messages);) ++enough;
  out.ids = encoded(by, without(enough));
  while (fewest + 1 < enough) {
    const std::size_t middle = fewest + (enough - fewest) / 2;
    std::vector<std::int32_t> ids = encoded(by, without(middle));
    if (std::ssize(ids) <= most)
      enough = middle, out.ids = std::move(ids);
    else
      fewest = middle;
  }
  out.left_out = conversation.messages.size() - without(enough).messages.size();
  return out;
}

}  // namespace sherd::data
