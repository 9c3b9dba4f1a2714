#include "data/chat_template.h"

#include <array>

#include "base/error.h"
#include "base/excerpt.h"

namespace sherd::data {
namespace {

const std::array<std::string, 4> names{"chatml", "llama3", "mistral", "plain"};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r\n\v\f";
  const std::size_t begin = text.find_first_not_of(space);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

/// A conversation that is being written down.
struct Writer {
  std::vector<Segment> segments;

  void text(std::string text, bool learned = false) {
    if (!text.empty()) segments.push_back({std::move(text), learned, Segment::Kind::text});
  }
  void control(std::string token, bool learned = false) {
    segments.push_back({std::move(token), learned, Segment::Kind::control});
  }
  void end(bool learned) { segments.push_back({"", learned, Segment::Kind::end}); }
};

bool is_answer(const Message& message) {
  return message.role == "assistant";
}
bool is_learned(const Message& message) {
  return is_answer(message) && message.learned;
}

constexpr const char *chatml_begin = "<|im_start|>", *chatml_end = "<|im_end|>",
                     *llama3_begin = "<|start_header_id|>", *llama3_end = "<|eot_id|>",
                     *mistral_begin = "[INST]", *plain_answer = "### Assistant:\n";

void write_chatml(Writer& out, std::span<const Message> messages) {
  for (const Message& message : messages) {
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

void write_llama3(Writer& out, std::span<const Message> messages) {
  out.control("<|begin_of_text|>");
  for (const Message& message : messages) {
    write_llama3_header(out, message.role);
    out.text(std::string(trimmed(message.content)), is_learned(message));
    out.control(llama3_end, is_learned(message));
  }
}

void write_mistral(Writer& out, std::span<const Message> messages) {
  std::string system;
  bool users_turn = true;
  out.control("<s>");
  for (const Message& message : messages) {
    if (message.role == "system") {
      if (&message != messages.data())
        fail(ErrorKind::data,
             "a system message that is not the first, which the template mistral has no "
             "place for");
      system = message.content + "\n\n";
      continue;
    }
    if (is_answer(message) == users_turn)
      fail(ErrorKind::data, "two messages of the ", message.role,
           users_turn ? " before one of the user" : " behind each other",
           "; the template mistral takes user and assistant in turn, the user first");
    users_turn = !users_turn;
    if (is_answer(message)) {
      out.text(" " + message.content, is_learned(message));
      out.end(is_learned(message));
    } else {
      out.control(mistral_begin);
      out.text(" " + system + message.content);
      out.control(" [/INST]");
      system.clear();
    }
  }
}

void write_plain(Writer& out, std::span<const Message> messages) {
  for (const Message& message : messages) {
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

std::optional<ChatTemplate> chat_template_of_jinja(std::string_view text) {
  const auto has = [&](const char* part) { return text.find(part) != std::string_view::npos; };
  if (has(chatml_begin)) return ChatTemplate::chatml;
  if (has(llama3_begin)) return ChatTemplate::llama3;
  if (has(mistral_begin)) return ChatTemplate::mistral;
  if (has("### Assistant:")) return ChatTemplate::plain;
  return std::nullopt;
}

namespace {
Writer written(ChatTemplate which, std::span<const Message> messages) {
  if (messages.empty()) fail(ErrorKind::data, "a conversation without messages");
  for (const Message& message : messages)
    if (message.role != "system" && message.role != "user" && message.role != "assistant")
      fail(ErrorKind::data, "a message has the role '", excerpt(message.role),
           "'; conversations are of system, user and assistant");
  Writer out;
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

std::vector<Segment> render(ChatTemplate which, std::span<const Message> messages) {
  return written(which, messages).segments;
}

std::vector<Segment> render_question(ChatTemplate which, std::span<const Message> messages) {
  Writer out = written(which, messages);
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

std::string jinja_of(ChatTemplate which, bool begins) {
  const std::string each = "{% for message in messages %}", end = "{% endfor %}",
                    question = "{% if add_generation_prompt %}", begin = begins ? "{{ bos_token }}" : "";
  switch (which) {
    case ChatTemplate::chatml:
      return begin + each +
             "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}" + end +
             question + "{{ '<|im_start|>assistant\\n' }}{% endif %}";
    case ChatTemplate::llama3:
      return "{{ '<|begin_of_text|>' }}" + each +
             "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
             "{{ message['content'] | trim }}{{ '<|eot_id|>' }}" +
             end + question + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
    case ChatTemplate::mistral:
      return "{% set first = namespace(system='') %}{{ '<s>' }}" + each +
             "{% if message['role'] == 'system' %}{% set first.system = message['content'] + '\\n\\n' %}"
             "{% elif message['role'] == 'user' %}"
             "{{ '[INST] ' + first.system + message['content'] + ' [/INST]' }}{% set first.system = '' %}"
             "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}" +
             end;
    case ChatTemplate::plain:
      break;
  }
  return begin + each +
         "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
         "{% elif message['role'] == 'user' %}{{ '### User:\\n' + message['content'] + '\\n\\n' }}"
         "{% else %}{{ '### Assistant:\\n' + message['content'] + eos_token }}{% endif %}" +
         end + question + "{{ '### Assistant:\\n' }}{% endif %}";
}

std::string end_of_answer(ChatTemplate which) {
  return which == ChatTemplate::chatml ? chatml_end : which == ChatTemplate::llama3 ? llama3_end : "";
}

}  // namespace sherd::data
