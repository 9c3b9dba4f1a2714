#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "data/templates/chat_template.h"
#include "data/tokenizer.h"

// Conversations that a model is to continue: what it reads, and where its answer ends.

namespace sherd::data {

/// A conversation up to where the assistant's answer begins, as ids.
struct Question {
  std::vector<std::int32_t> ids;
  std::size_t left_out = 0;  ///< messages of the beginning that had no place
};

/// The ids that prepare() gives such a conversation (transformers' apply_chat_template() with
/// add_generation_prompt), of which special tokens that texts spell out are text. Where there are more than
/// `most`, turns are left out: a user's message with its answers, the oldest first, never the system's text
/// nor the last question, which may then still be too long. Throws as render_question() and
/// encode_segments().
Question encode_question(const Tokenizer& tokenizer, ChatTemplate which,
                         std::span<const ChatMessage> messages,
                         std::int64_t most = std::numeric_limits<std::int64_t>::max());

/// The tokens and texts that end an answer.
struct AnswerEnd {
  std::vector<std::int32_t> ids;   ///< each of these tokens
  std::vector<std::string> texts;  ///< and these, where the template's token is none of the tokenizer's
};
AnswerEnd answer_end(const Tokenizer& tokenizer, ChatTemplate which);

}  // namespace sherd::data
