#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/templates/conversation.h"
#include "data/tokenizer.h"

namespace sherd::data {

enum class SegmentKind {
  text,
  control,  ///< a token of the template's own, "<|im_end|>": one id where the tokenizer has it, else text
  end,      ///< the tokenizer's end of a document
  apart     ///< the same, and what follows is a text of its own
};
/// A part of an example's text, one behind the other.
struct TextSegment {
  std::string text;
  bool learned = false;  ///< its tokens are targets of the loss
  SegmentKind kind = SegmentKind::text;
};

/// The tokens and texts that end an answer.
struct AnswerEnd {
  std::vector<std::int32_t> ids;   ///< each of these tokens
  std::vector<std::string> texts;  ///< and these, where no token ends it
  std::string token = {};          ///< the special token that ends one, as the template writes it, if any
  std::vector<std::string> closing = {};  ///< special tokens that directly follow it
};

/// How conversations are written down for a tokenizer: a template in transformers' language
/// (jinja/template.h), as models are published with, or one of four that are here, after families' own:
/// - chatml (Qwen and many others): `<|im_start|>ROLE\nTEXT<|im_end|>\n`
/// - llama3: `<|begin_of_text|>`, then `<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>`, with
///   texts trimmed
/// - mistral: `<s>`, then `[INST] TEXT [/INST] ANSWER</s>`; the system's text before the first user's (v0.2).
///   With tokenizers that have the token [INST], no space before [/INST], and the system's text before the
///   last user's (v0.3); where they are byte-level, no other space (Nemo); with [SYSTEM_PROMPT], the system's
///   text between that and its end (Small)
/// - plain, for tokenizers without such tokens: `SYSTEM\n\n### User:\nTEXT\n\n### Assistant:\nANSWER` and the
///   end of the document
/// In front of these stands the token with which the tokenizer begins documents, in place of the template's
/// own, and they write the roles system, user and assistant alone. None puts in a system message that the
/// conversation does not have.
///
/// The ids are those of transformers' apply_chat_template(), but for one thing: special tokens that a message
/// spells out are text. Copies share one template; any thread may call.
class ChatTemplate {
 public:
  /// One of the four. Throws Error{config} for any other name.
  static ChatTemplate named(const std::string& name, const Tokenizer& tokenizer);
  /// The text of a template, with the names that transformers gives it: bos_token, eos_token and so on.
  /// Throws Error{config} for one that cannot be read. The tokenizer must outlive it.
  static ChatTemplate of_text(const std::string& text, jinja::Dict tokens, const Tokenizer& tokenizer);
  /// The template with that spec().
  static ChatTemplate of_spec(const std::string& spec, const Tokenizer& tokenizer);
  /// The one of the four whose tokens the tokenizer has; plain where it has none's.
  static ChatTemplate by_tokens(const Tokenizer& tokenizer);

  /// The text from which of_spec() makes it again: a name, or a JSON object of the template and its tokens.
  const std::string& spec() const;
  /// name_of_spec()
  std::string name() const;
  /// In transformers' language.
  const std::string& text() const;
  /// The special tokens that of_text() was given.
  const jinja::Dict& given_tokens() const;

  /// A whole conversation. Learned are the assistant's answers that are to be: what {% generation %} encloses
  /// or, where the template has none, what stands behind the text that asks for the answer (or else where the
  /// message's own text begins), up to the end of the message and the special token behind it; of an answer
  /// that no token ends, the end of the document. Throws Error{data} for no message, for one of which nothing
  /// is written, for fields that the template does not name, and what it refuses itself.
  std::vector<TextSegment> render(const Conversation& conversation) const;
  /// The same up to where the assistant's next answer begins (add_generation_prompt). Throws Error{data}
  /// where the last message is an answer, too.
  std::vector<TextSegment> render_question(const Conversation& conversation) const;

  const Tokenizer& tokenizer() const;
  const AnswerEnd& answer_end() const;
  /// White space in front of an answer, which is no part of it, though the model makes it.
  const std::string& before_answer() const;

 private:
  struct State;
  explicit ChatTemplate(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  static ChatTemplate make(std::string spec, std::string text, jinja::Dict tokens,
                           const Tokenizer& tokenizer);
  std::shared_ptr<const State> state_;
};

/// A conversation up to where the assistant's answer begins, as ids.
struct Question {
  std::vector<std::int32_t> ids;
  std::size_t left_out = 0;  ///< messages of the beginning that had no place
};

/// The ids that prepare() gives such a conversation. Where there are more than `most`, turns are left out: a
/// user's message with its answers, the oldest first, never the system's text nor the last question, which
/// may then still be too long. Throws as render_question() and encode_segments().
Question encode_question(const ChatTemplate& by, const Conversation& conversation,
                         std::int64_t most = std::numeric_limits<std::int64_t>::max());

/// The name of a spec's template in messages; "a template of its own" where it has none.
std::string name_of_spec(const std::string& spec);

/// The text of one of the four, for a tokenizer whose documents end with a token that has a text; else, and
/// with `end_by_name`, `eos_token` is to be given.
std::string jinja_of(const std::string& name, const Tokenizer& tokenizer, bool end_by_name = false);
/// The names of the four, and the tokens of their own that they write.
const std::vector<std::string>& builtin_templates();
std::vector<std::string> controls_of(const std::string& name);

}  // namespace sherd::data
