#include "data/templates/chat_template.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

const std::array<std::string, 4> names{"chatml", "llama3", "mistral", "plain"};

/// The text as Python, and so jinja, trims it.
std::string trimmed(std::string_view text) {
  std::string storage;
  text = valid_utf8(text, storage);
  while (!text.empty() && is_python_space(first_character(text))) text.remove_prefix(utf8_length(text));
  return std::string(without_python_space_behind(text));
}

/// A conversation that is being written down.
struct Writer {
  const Tokenizer& tokenizer;
  std::vector<TextSegment> segments;

  void text(std::string text, bool learned = false) {
    if (!text.empty()) segments.push_back({std::move(text), learned, SegmentKind::text});
  }
  void control(std::string token, bool learned = false) {
    segments.push_back({std::move(token), learned, SegmentKind::control});
  }
  void end(bool learned) { segments.push_back({"", learned, SegmentKind::end}); }
  /// Adds the beginning of every document of the tokenizer; where it has none, the template's own token, if
  /// any.
  void begin(const char* token = nullptr) {
    if (tokenizer.begin_of_document())
      segments.push_back({"", false, SegmentKind::begin});
    else if (token)
      control(token);
  }
};

bool is_answer(const ChatMessage& message) {
  return message.role == "assistant";
}
bool is_learned(const ChatMessage& message) {
  return is_answer(message) && message.learned;
}

constexpr const char *chatml_begin = "<|im_start|>", *chatml_end = "<|im_end|>",
                     *llama3_begin = "<|start_header_id|>", *llama3_end = "<|eot_id|>",
                     *llama3_document = "<|begin_of_text|>", *mistral_begin = "[INST]",
                     *mistral_end = "[/INST]", *mistral_system = "[SYSTEM_PROMPT]",
                     *mistral_system_end = "[/SYSTEM_PROMPT]", *mistral_document = "<s>",
                     *plain_answer = "### Assistant:\n";

/// Mistral's ways, by the tokenizer's tokens (mistral-common): without [INST] (v1) a question's ends are
/// text, with spaces around, and the system's text lies in the first question; with it (v2, v3) no space is
/// in front of the second, and it lies in the last; with [SYSTEM_PROMPT] (v7) it lies between tokens of its
/// own. A space begins each text where the tokenizer begins words with one; byte-level ones (Tekken) do not.
struct MistralForm {
  bool tokens, system_tokens, space = true;

  explicit MistralForm(const Tokenizer& tokenizer)
      : tokens(tokenizer.token_id(mistral_begin) && tokenizer.token_id(mistral_end)),
        system_tokens(tokens && tokenizer.token_id(mistral_system) &&
                      tokenizer.token_id(mistral_system_end)) {
    if (!tokens) return;
    std::vector<std::int32_t> alone, behind;
    tokenizer.encode("a", {}, alone);
    tokenizer.encode(" a", {.behind = EncodeOptions::Behind::text}, behind);
    space = alone == behind;
  }
  const char* front() const { return space ? " " : ""; }
  const char* back() const { return tokens ? "" : " "; }
};

void write_chatml(Writer& out, std::span<const ChatMessage> messages) {
  out.begin();
  for (const ChatMessage& message : messages) {
    out.control(chatml_begin);
    out.text(message.role + "\n");
    out.text(message.content, is_learned(message));
    out.control(chatml_end, is_learned(message));
    out.text("\n");
  }
}

void write_llama3_header(Writer& out, const std::string& role) {
  out.control(llama3_begin);
  out.text(role);
  out.control("<|end_header_id|>");
  out.text("\n\n");
}

void write_llama3(Writer& out, std::span<const ChatMessage> messages) {
  out.begin(llama3_document);
  for (const ChatMessage& message : messages) {
    write_llama3_header(out, message.role);
    out.text(trimmed(message.content), is_learned(message));
    out.control(llama3_end, is_learned(message));
  }
}

void write_mistral(Writer& out, std::span<const ChatMessage> messages) {
  const MistralForm form(out.tokenizer);
  const ChatMessage* with_system = nullptr;  // the question in front of which the system's text lies
  for (const ChatMessage& message : messages)
    if (message.role == "user" && (form.tokens || !with_system)) with_system = &message;
  std::string system;
  bool users_turn = true;
  out.begin(mistral_document);
  for (const ChatMessage& message : messages) {
    const bool is_first = &message == messages.data();
    if (message.role == "system") {
      if (!is_first)
        fail(ErrorKind::data,
             "a system message that is not the first, which the template mistral has no "
             "place for");
      if (form.system_tokens) {
        out.control(mistral_system);
        out.text(form.front() + message.content);
        out.control(mistral_system_end);
      } else {
        system = message.content + "\n\n";
      }
      continue;
    }
    if (is_answer(message) == users_turn)
      fail(ErrorKind::data,
           users_turn ? "an answer of the assistant before any message of the user"
                      : cat("two messages of the ", message.role, " behind each other"),
           "; the template mistral takes user and assistant in turn, the user first");
    users_turn = !users_turn;
    if (is_answer(message)) {
      out.text(form.front() + message.content, is_learned(message));
      out.end(is_learned(message));
    } else {
      out.control(mistral_begin);
      out.text(cat(form.front(), &message == with_system ? system : "", message.content, form.back()));
      out.control(mistral_end);
    }
  }
}

void write_plain(Writer& out, std::span<const ChatMessage> messages) {
  out.begin();
  for (const ChatMessage& message : messages) {
    if (message.role == "system") {
      out.text(message.content + "\n\n");
    } else if (is_answer(message)) {
      out.text(plain_answer);
      out.text(message.content, is_learned(message));
      out.end(is_learned(message));
    } else {
      out.text("### User:\n" + message.content + "\n\n");
    }
  }
}

}  // namespace

ChatTemplate parse_chat_template(const std::string& name) {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (name == names[i]) return static_cast<ChatTemplate>(i);
  const std::string close = nearest(name, names);
  fail(ErrorKind::config, "there is no chat template '", excerpt(name),
       "'; give chatml, llama3, mistral or plain",
       close.empty() ? std::string() : cat(" (did you mean '", close, "'?)"));
}

const std::string& name_of(ChatTemplate which) {
  return names[static_cast<std::size_t>(which)];
}

ChatTemplate chat_template_of(const Tokenizer& tokenizer) {
  if (tokenizer.token_id(chatml_begin)) return ChatTemplate::chatml;
  if (tokenizer.token_id(llama3_begin)) return ChatTemplate::llama3;
  if (tokenizer.token_id(mistral_begin)) return ChatTemplate::mistral;
  return ChatTemplate::plain;
}

namespace {
Writer written(ChatTemplate which, const Tokenizer& tokenizer, std::span<const ChatMessage> messages) {
  if (messages.empty()) fail(ErrorKind::data, "a conversation without messages");
  for (const ChatMessage& message : messages)
    if (message.role != "system" && message.role != "user" && message.role != "assistant")
      fail(ErrorKind::data, "a message has the role '", excerpt(message.role),
           "'; conversations are of system, user and assistant: say it as one of these, or leave the line "
           "out");
  Writer out{tokenizer, {}};
  switch (which) {
    case ChatTemplate::chatml:
      write_chatml(out, messages);
      break;
    case ChatTemplate::llama3:
      write_llama3(out, messages);
      break;
    case ChatTemplate::mistral:
      write_mistral(out, messages);
      break;
    case ChatTemplate::plain:
      write_plain(out, messages);
      break;
  }
  return out;
}
}  // namespace

std::vector<TextSegment> render(ChatTemplate which, const Tokenizer& tokenizer,
                                std::span<const ChatMessage> messages) {
  return written(which, tokenizer, messages).segments;
}

std::vector<TextSegment> render_question(ChatTemplate which, const Tokenizer& tokenizer,
                                         std::span<const ChatMessage> messages) {
  Writer out = written(which, tokenizer, messages);
  if (messages.back().role != "user")
    fail(ErrorKind::data, "a conversation ends with a message of the ", messages.back().role,
         "; what is to be answered is the user's, and comes last");
  if (which == ChatTemplate::chatml) {
    out.control(chatml_begin);
    out.text("assistant\n");
  }
  if (which == ChatTemplate::llama3) write_llama3_header(out, "assistant");
  if (which == ChatTemplate::plain) out.text(plain_answer);
  return std::move(out.segments);
}

namespace {
/// A text as jinja writes it: what `{{ … }}` holds.
std::string jinja_string(std::string_view text) {
  std::string out = "'";
  for (const char c : text)
    out += c == '\n' ? "\\n" : c == '\'' || c == '\\' ? cat('\\', c) : std::string(1, c);
  return out + "'";
}

/// Each message and its `content`, of which there may be a list of parts.
constexpr const char* jinja_each =
    "{% for message in messages %}{% set content = message['content'] if message['content'] is string else "
    "message['content'] | map(attribute='text') | join %}";

std::string mistral_jinja(const Tokenizer& tokenizer, const std::string& begin, const std::string& close) {
  const MistralForm form(tokenizer);
  const std::string each = jinja_each, last = "{% endfor %}", content = " + content + ",
                    question = jinja_string(cat(mistral_begin, form.front())) +
                               (form.system_tokens ? "" : " + system") + content +
                               jinja_string(cat(form.back(), mistral_end)),
                    answer = jinja_string(form.front()) + content + close;
  if (form.system_tokens)
    return begin + each + "{% if message['role'] == 'system' %}{{ " +
           jinja_string(cat(mistral_system, form.front())) + content + jinja_string(mistral_system_end) +
           " }}{% elif message['role'] == 'user' %}{{ " + question + " }}{% else %}{{ " + answer +
           " }}{% endif %}" + last;
  return "{% set at = namespace(system='', turn=0) %}" + each +
         "{% if message['role'] == 'system' %}{% set at.system = content + '\\n\\n' %}"
         "{% elif message['role'] == 'user'" +
         (form.tokens ? "" : " and at.turn == 0") + " %}{% set at.turn = loop.index %}{% endif %}" + last +
         begin + each +
         "{% if message['role'] == 'user' %}{% set system = at.system if loop.index == at.turn else '' "
         "%}{{ " +
         question + " }}{% elif message['role'] == 'assistant' %}{{ " + answer + " }}{% endif %}" + last;
}
}  // namespace

std::string jinja_of(ChatTemplate which, const Tokenizer& tokenizer) {
  const std::string each = jinja_each, last = "{% endfor %}", question = "{% if add_generation_prompt %}",
                    close = jinja_string(tokenizer.token(tokenizer.end_of_document()));
  const auto begin = [&](const char* otherwise) {
    const auto id = tokenizer.begin_of_document();
    const std::string token = id ? tokenizer.token(*id) : otherwise;
    return token.empty() ? token : "{{ " + jinja_string(token) + " }}";
  };
  switch (which) {
    case ChatTemplate::chatml:
      return begin("") + each + "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}" +
             last + question + "{{ '<|im_start|>assistant\\n' }}{% endif %}";
    case ChatTemplate::llama3:
      return begin(llama3_document) + each +
             "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
             "{{ content | trim }}{{ '<|eot_id|>' }}" +
             last + question + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
    case ChatTemplate::mistral:
      return mistral_jinja(tokenizer, begin(mistral_document), close);
    case ChatTemplate::plain:
      break;
  }
  return begin("") + each +
         "{% if message['role'] == 'system' %}{{ content + '\\n\\n' }}"
         "{% elif message['role'] == 'user' %}{{ '### User:\\n' + content + '\\n\\n' }}"
         "{% else %}{{ '### Assistant:\\n' + content + " +
         close + " }}{% endif %}" + last + question + "{{ '### Assistant:\\n' }}{% endif %}";
}

std::string before_answer(ChatTemplate which, const Tokenizer& tokenizer) {
  return which == ChatTemplate::mistral ? MistralForm(tokenizer).front() : "";
}

std::string end_of_answer(ChatTemplate which) {
  return which == ChatTemplate::chatml ? chatml_end : which == ChatTemplate::llama3 ? llama3_end : "";
}

}  // namespace sherd::data
