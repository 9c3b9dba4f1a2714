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

void write_chatml(Writer& out, std::span<const Message> messages) {
  for (const Message& message : messages) {
    out.control("<|im_start|>");
    out.text(message.role + "\n");
    out.text(message.content, is_learned(message));
    out.control("<|im_end|>", is_learned(message));
    out.text("\n");
  }
}

void write_llama3(Writer& out, std::span<const Message> messages) {
  const auto header = [&](const std::string& role) {
    out.control("<|start_header_id|>");
    out.text(role);
    out.control("<|end_header_id|>");
    out.text("\n\n");
  };
  out.control("<|begin_of_text|>");
  for (const Message& message : messages) {
    header(message.role);
    out.text(std::string(trimmed(message.content)), is_learned(message));
    out.control("<|eot_id|>", is_learned(message));
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
      out.control("[INST]");
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
      out.text("### Assistant:\n");
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
  if (tokenizer.token_id("<|im_start|>")) return ChatTemplate::chatml;
  if (tokenizer.token_id("<|start_header_id|>")) return ChatTemplate::llama3;
  if (tokenizer.token_id("[INST]")) return ChatTemplate::mistral;
  return ChatTemplate::plain;
}

std::vector<Segment> render(ChatTemplate which, std::span<const Message> messages) {
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
  return std::move(out.segments);
}

}  // namespace sherd::data
