#include "data/templates/written_conversation.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {

using jinja::Value;

namespace {

/// The value with other texts: of each, and of the keys of dictionaries, what `text` gives.
template <class Text>
Value with_texts(const Value& value, const Text& text) {
  if (value.is_string()) return text(value.text());
  if (value.is_list()) {
    jinja::List items;
    for (const Value& item : value.sequence().items) items.push_back(with_texts(item, text));
    return Value::list(std::move(items), value.sequence().tuple);
  }
  if (!value.is_dict()) return value;
  jinja::Dict items;
  for (const auto& [key, item] : value.mapping().items)
    items.emplace_back(with_texts(key, text), with_texts(item, text));
  return Value::dict(std::move(items));
}

/// A call's arguments are others, and there is one at least.
Value changed(const Value& value, bool argument) {
  if (value.is_list()) {
    jinja::List items;
    for (const Value& item : value.sequence().items) items.push_back(changed(item, argument));
    if (argument && items.empty()) items.emplace_back(mark_answer);
    return Value::list(std::move(items), value.sequence().tuple);
  }
  if (!value.is_dict()) return argument ? Value(mark_answer) : value;
  jinja::Dict items;
  for (const auto& [key, item] : value.mapping().items)
    items.emplace_back(key, changed(item, argument || key.str() == "arguments"));
  if (argument && items.empty()) items.emplace_back(mark_answer, mark_answer);
  return Value::dict(std::move(items));
}

bool has_arguments(const Value& value) {
  if (value.is_list())
    return std::any_of(value.sequence().items.begin(), value.sequence().items.end(), has_arguments);
  return value.is_dict() &&
         std::any_of(value.mapping().items.begin(), value.mapping().items.end(), [](const auto& item) {
           return item.first.str() == "arguments" || has_arguments(item.second);
         });
}

void add_all(std::vector<Control>& out, std::string_view text, std::string_view written,
             const std::string& token) {
  for (std::size_t at = 0; (at = text.find(written, at)) != std::string_view::npos; at += written.size())
    out.push_back({token, at, at + written.size(), at, at + written.size()});
}

/// Whether special tokens are made of such characters: words are not.
bool is_of_tokens(std::string_view character) {
  const auto c = static_cast<unsigned char>(character.front());
  return c >= 0x80 ||
         (c > ' ' && !(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z'));
}

/// With a mark behind each such character, so that nothing of a text can become a part of a token.
std::string torn(const std::string& text) {
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view character = rest.substr(0, std::max<std::size_t>(1, utf8_length(rest)));
    out.append(character);
    if (is_of_tokens(character)) out.append(mark_apart);
    rest.remove_prefix(character.size());
  }
  return out;
}

/// Cuts a text into the template's own tokens and what lies between.
class Cutter {
 public:
  Cutter(std::string_view text, const std::vector<Control>& controls,
         const std::vector<jinja::Generated>& learned)
      : text_(text), learned_(learned) {
    std::size_t at = 0;
    for (const Control& control : controls) {
      if (control.first < at) continue;
      add_text(at, control.first);
      out_.push_back({control.token, is_learned(control.begin),
                      control.token.empty() ? SegmentKind::end : SegmentKind::control});
      at = control.last;
    }
    add_text(at, text.size());
  }
  std::vector<TextSegment> take() { return std::move(out_); }

 private:
  bool is_learned(std::size_t at) const {
    return std::any_of(learned_.begin(), learned_.end(),
                       [at](const jinja::Generated& part) { return part.begin <= at && at < part.end; });
  }
  void add_text(std::size_t begin, std::size_t end) {
    while (begin < end) {
      std::size_t next = end;
      for (const jinja::Generated& part : learned_)
        for (const std::size_t border : {part.begin, part.end})
          if (border > begin) next = std::min(next, border);
      TextSegment segment{std::string(text_.substr(begin, next - begin)), is_learned(begin),
                          SegmentKind::text};
      for (std::size_t at; (at = segment.text.find(mark_apart)) != std::string::npos;)
        segment.text.erase(at, mark_apart.size());
      out_.push_back(std::move(segment));
      begin = next;
    }
  }

  std::string_view text_;
  const std::vector<jinja::Generated>& learned_;
  std::vector<TextSegment> out_;
};

}  // namespace

bool is_answer(const ChatMessage& message) {
  return message.role == "assistant";
}

bool is_space_alone(std::string_view text) {
  while (!text.empty() && is_python_space(first_character(text))) text.remove_prefix(utf8_length(text));
  return text.empty();
}

std::vector<Control> controls_in(const TemplateRun& by, std::string_view text) {
  std::vector<Control> out;
  for (const Tokenizer::Spelled& found : by.tokenizer.special_tokens_in(text)) {
    const std::string token = by.tokenizer.token(found.id);
    const std::size_t within = text.substr(found.begin, found.end - found.begin).find(token);
    const std::size_t begin = found.begin + (within == std::string_view::npos ? 0 : within),
                      end = within == std::string_view::npos ? found.end : begin + token.size();
    out.push_back({token, begin, end, found.begin, found.end});
  }
  for (const std::string& token : by.controls) {
    const auto id = by.tokenizer.token_id(token);
    if (!id || !by.tokenizer.is_special(*id)) add_all(out, text, token, token);
  }
  add_all(out, text, mark_end, "");
  std::sort(out.begin(), out.end(), [](const Control& a, const Control& b) { return a.begin < b.begin; });
  return out;
}

WrittenConversation::WrittenConversation(const TemplateRun& by, const Conversation& conversation) : by_(by) {
  for (const ChatMessage& message : conversation.messages) {
    jinja::Dict fields = guarded(value_of(message)).mapping().items;
    for (auto& [key, value] : fields)
      if (key.str() == "content") value = as_taken(value, message.content);
    messages_.push_back(Value::dict(std::move(fields)));
  }
  for (const auto& [name, value] : conversation.names) names_.emplace_back(name, guarded(value));
}

std::string WrittenConversation::text(std::size_t count, bool asks,
                                      std::vector<jinja::Generated>* marked) const {
  jinja::Dict names{{"messages", Value::list({messages_.begin(), messages_.begin() + std::ptrdiff_t(count)})},
                    {"add_generation_prompt", asks},
                    {"tools", jinja::None{}},
                    {"documents", jinja::None{}}};
  names.insert(names.end(), by_.tokens.begin(), by_.tokens.end());
  names.insert(names.end(), names_.begin(), names_.end());
  try {
    return by_.runs.render(names, marked);
  } catch (const Error& error) {
    fail(error.kind(), "the template refuses it: ", error.what());
  }
}

std::string WrittenConversation::with(std::size_t which, const std::string& content, bool asks) {
  return with_message(which, saying(messages_[which], content), asks);
}

std::string WrittenConversation::with_other_calls(std::size_t which) {
  jinja::Dict fields = messages_[which].mapping().items;
  for (auto& [key, value] : fields)
    if (key.str() == "tool_calls") value = changed(value, !has_arguments(value));
  return with_message(which, Value::dict(std::move(fields)));
}

std::string WrittenConversation::with_other_content(std::size_t which) {
  jinja::Dict fields = messages_[which].mapping().items;
  const std::string mark(mark_answer);
  for (auto& [key, value] : fields)
    if (key.str() == "content") value = as_taken(mark, mark);
  return with_message(which, Value::dict(std::move(fields)));
}

std::string WrittenConversation::numbered_mark(std::size_t which) {
  return cat(mark_answer, which, mark_answer);
}

std::string WrittenConversation::numbered(std::vector<std::size_t>& which) const {
  WrittenConversation other = *this;
  for (std::size_t i = 0; i < messages_.size(); ++i) {
    jinja::Dict fields = messages_[i].mapping().items;  // which others may refer to
    for (auto& [key, value] : fields)
      if (key.str() == "content" && value.is_true())
        value = as_taken(numbered_mark(i), numbered_mark(i)), which.push_back(i);
    other.messages_[i] = Value::dict(std::move(fields));
  }
  return other.text(false);
}

void WrittenConversation::require_own_controls(const std::vector<Control>& controls, bool asks) const {
  WrittenConversation other = *this;
  bool any = false;
  const auto tear = [&any](const std::string& of) {
    std::string out = torn(of);
    any = any || out.size() > of.size();
    return Value(std::move(out));
  };
  for (Value& message : other.messages_) {
    jinja::Dict fields = message.mapping().items;
    for (auto& [key, value] : fields)
      if (key.str() != "role") value = with_texts(value, tear);
    message = Value::dict(std::move(fields));
  }
  for (auto& [name, value] : other.names_) value = with_texts(value, tear);
  if (!any || controls.empty()) return;
  std::string written;
  try {
    written = other.text(asks);
  } catch (const Error&) {  // of a text that it takes apart
    return;
  }
  const std::vector<Control> own = controls_in(by_, written);
  const bool same = std::equal(own.begin(), own.end(), controls.begin(), controls.end(),
                               [](const Control& a, const Control& b) { return a.token == b.token; });
  if (!same)
    fail(ErrorKind::data, "a message's text becomes a special token in what the template makes of it (",
         controls.size(), " of them, and ", own.size(),
         " are the template's own): take that out of the message");
}

std::string WrittenConversation::with_message(std::size_t which, Value message, bool asks) {
  std::swap(messages_[which], message);
  try {
    std::string out = text(asks);
    std::swap(messages_[which], message);
    return out;
  } catch (...) {
    std::swap(messages_[which], message);
    throw;
  }
}

Value WrittenConversation::saying(const Value& message, const std::string& content) const {
  return Value::dict({{"role", *message.find("role")}, {"content", as_taken(content, content)}});
}

/// A content, whose parts together are `text`.
Value WrittenConversation::as_taken(const Value& content, const std::string& text) const {
  if (content.is_list() && by_.content == Content::text) return guarded(text);
  if (content.is_string() && by_.content == Content::parts)
    return Value::list({Value::dict({{"type", "text"}, {"text", content}})});
  return content;
}

/// With a mark within each special token, so that those in what is written are the template's own.
Value WrittenConversation::guarded(const Value& value) const {
  return with_texts(value, [this](const std::string& text) { return Value(guarded(text)); });
}

std::string WrittenConversation::guarded(const std::string& text) const {
  for (const std::string_view mark : {mark_apart, mark_answer, mark_end})
    if (text.find(mark) != std::string::npos)
      fail(ErrorKind::data,
           "a message has one of the characters U+FDD0 to U+FDD2, which no text may have: take it out");
  std::string out;
  std::size_t done = 0;
  for (const Control& control : controls_in(by_, text)) {
    if (control.begin < done) continue;
    const std::size_t cut = control.begin + utf8_length(std::string_view(text).substr(control.begin));
    out.append(text, done, cut - done).append(mark_apart);
    done = cut;
  }
  return out.append(text, done);
}

std::vector<TextSegment> segments_of(std::string_view text, const std::vector<Control>& controls,
                                     const std::vector<jinja::Generated>& learned) {
  return Cutter(text, controls, learned).take();
}

}  // namespace sherd::data
