#include "data/templates/chat_template.h"

#include <algorithm>

#include "data/text/example.h"

namespace sherd::data {
namespace {

std::vector<std::int32_t> encoded(const Tokenizer& tokenizer, ChatTemplate which,
                                  std::span<const ChatMessage> messages) {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> learned;
  encode_segments(tokenizer, render_question(which, tokenizer, messages), SpelledTokens::text, ids, learned);
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

Question encode_question(const Tokenizer& tokenizer, ChatTemplate which,
                         std::span<const ChatMessage> messages, std::int64_t most) {
  Question out{encoded(tokenizer, which, messages)};
  std::vector<ChatMessage> rest(messages.begin(), messages.end());
  while (std::ssize(out.ids) > most && remove_turn(rest)) out.ids = encoded(tokenizer, which, rest);
  out.left_out = messages.size() - rest.size();
  return out;
}

AnswerEnd answer_end(const Tokenizer& tokenizer, ChatTemplate which) {
  AnswerEnd out{{tokenizer.end_of_document()}, {}};
  const std::string end = end_of_answer(which);
  if (end.empty()) return out;
  if (const auto id = tokenizer.token_id(end))
    out.ids.push_back(*id);
  else
    out.texts.push_back(end);
  return out;
}

}  // namespace sherd::data
