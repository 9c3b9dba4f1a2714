#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace sherd::data {

/// One message of a conversation.
struct ChatMessage {
  std::string role;  ///< system, user or assistant
  std::string content;
  /// False for an assistant's message from which nothing is to be learned (OpenAI's `"weight": 0`).
  bool learned = true;
};

enum class SegmentKind {
  text,
  control,  ///< a token of the template's own, "<|im_end|>": one id where the tokenizer has it, else text
  begin,    ///< the token with which the tokenizer begins documents; only where it has one
  end,      ///< the tokenizer's end of a document
  apart     ///< the same, and what follows is a text of its own
};
/// A part of an example's text, one behind the other.
struct TextSegment {
  std::string text;
  bool learned = false;  ///< its tokens are targets of the loss
  SegmentKind kind = SegmentKind::text;
};

/// How conversations are written down, after the templates that the families publish:
/// - chatml (Qwen and many others): <|im_start|>ROLE\nTEXT<|im_end|>\n
/// - llama3: <|begin_of_text|>, then <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>, with texts
///   trimmed
/// - mistral: <s>, then [INST] TEXT [/INST] ANSWER</s>; the system's text before the first user's (v0.2).
///   With tokenizers that have the token [INST], no space before [/INST], and the system's text before the
///   last user's (v0.3); where they are byte-level, no other space (Nemo); with [SYSTEM_PROMPT], the system's
///   text between that and its end (Small)
/// - plain, for tokenizers without such tokens: SYSTEM\n\n### User:\nTEXT\n\n### Assistant:\nANSWER and the
///   end of the document
/// The token with which the tokenizer begins documents stands in front of each, in place of the template's
/// own. None puts in a system message that the conversation does not have.
enum class ChatTemplate { chatml, llama3, mistral, plain };

/// The template of that name, as above. Throws Error{config} for any other.
ChatTemplate parse_chat_template(const std::string& name);
const std::string& name_of(ChatTemplate which);

/// The one whose tokens the tokenizer has; plain where it has none's. Of a tokenizer that was published with
/// a template of its own: require_template().
ChatTemplate chat_template_of(const Tokenizer& tokenizer);
/// A whole conversation, as `tokenizer` is to encode it. Learned are the assistant's texts and what ends
/// each. Throws Error{data} for a role that is none of the three, an order that the template cannot write, or
/// no message.
std::vector<TextSegment> render(ChatTemplate which, const Tokenizer& tokenizer,
                                std::span<const ChatMessage> messages);
/// The same up to where the assistant's next answer begins (transformers' add_generation_prompt). Throws
/// Error{data} where the last message is not the user's, too.
std::vector<TextSegment> render_question(ChatTemplate which, const Tokenizer& tokenizer,
                                         std::span<const ChatMessage> messages);

/// A template in transformers' language (jinja) that writes what render() and render_question() write for a
/// tokenizer whose documents end with a token that has a text.
std::string jinja_of(ChatTemplate which, const Tokenizer& tokenizer);

/// The text in front of an answer, which is no part of it, though the model makes it.
std::string before_answer(ChatTemplate which, const Tokenizer& tokenizer);
/// The token with which an answer ends; empty: the end of the document.
std::string end_of_answer(ChatTemplate which);

// Conversations that a model is to continue.

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
