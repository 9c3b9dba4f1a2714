#include "data/templates/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"
#include "data/jinja/template.h"

namespace sherd::data {

using jinja::Value;

namespace {
/// How a template takes the text of a message: some take a list of parts alone, some nothing else.
enum class Content : std::uint8_t { either, text, parts };
}  // namespace

struct ChatTemplate::State {
  std::string spec, text;
  bool builtin;
  jinja::Template runs;
  jinja::Dict tokens;
  const Tokenizer& tokenizer;
  std::vector<std::string> controls;  ///< tokens of one of the four, whether the tokenizer has them or not
  Content content = Content::either;
  AnswerEnd answer_end = {};
  std::string before_answer = {};

  void find_content();
  void find_answer_end();
  void check(const Conversation& conversation) const;
};

namespace {

// Characters that no text has (noncharacters of Unicode), which stand in what a template is given:
constexpr std::string_view apart = "\xef\xb7\x90",  ///< within special tokens that a message spells out
    answered = "\xef\xb7\x91",                      ///< in place of a message
    no_token = "\xef\xb7\x92";                      ///< for the end of a document that has no text

/// A special token in a text: where it stands, and what it takes along of the white space around.
struct Control {
  std::string token;
  std::size_t begin, end, first, last;  ///< the token; with white space
};

bool is_space_alone(std::string_view text) {
  while (!text.empty() && is_python_space(first_character(text))) text.remove_prefix(utf8_length(text));
  return text.empty();
}

/// A conversation as one template writes it.
class Writing {
 public:
  template <class State>
  Writing(const State& by, const Conversation& conversation)
      : runs_(by.runs),
        tokens_(by.tokens),
        tokenizer_(by.tokenizer),
        controls_(by.controls),
        content_(by.content) {
    for (const ChatMessage& message : conversation.messages) {
      jinja::Dict fields = guarded(value_of(message)).mapping().items;
      for (auto& [key, value] : fields)
        if (key.str() == "content") value = as_taken(value, message.content);
      messages_.push_back(Value::dict(std::move(fields)));
    }
    for (const auto& [name, value] : conversation.names) names_.emplace_back(name, guarded(value));
  }

  /// Of the first `count` messages, one of which may be another.
  std::string text(std::size_t count, bool asks, std::vector<jinja::Generated>* marked = nullptr) const {
    jinja::Dict names{
        {"messages", Value::list({messages_.begin(), messages_.begin() + std::ptrdiff_t(count)})},
        {"add_generation_prompt", asks},
        {"tools", jinja::None{}},
        {"documents", jinja::None{}}};
    names.insert(names.end(), tokens_.begin(), tokens_.end());
    names.insert(names.end(), names_.begin(), names_.end());
    return runs_.render(names, marked);
  }
  std::string text(bool asks, std::vector<jinja::Generated>* marked = nullptr) const {
    return text(messages_.size(), asks, marked);
  }
  /// With a message that says `content` alone.
  std::string with(std::size_t which, const std::string& content) {
    return with(which, saying(messages_[which], content));
  }
  /// With another answer in place of one. Its calls have other arguments, and their names and ids, which what
  /// follows may refer to.
  std::string with_another(std::size_t which) {
    if (!calls(which)) return with(which, std::string(answered));
    jinja::Dict fields = messages_[which].mapping().items;
    for (auto& [key, value] : fields) {
      if (key.str() == "tool_calls") value = changed(value, false);
      if (key.str() == "content" && value.is_true())
        value = as_taken(std::string(answered), std::string(answered));
    }
    return with(which, Value::dict(std::move(fields)));
  }
  bool calls(std::size_t which) const { return messages_[which].find("tool_calls") != nullptr; }
  /// The first message of whose text nothing is written; nothing where all are, or nobody can tell.
  std::optional<std::size_t> dropped() const {
    Writing numbered = *this;
    const auto mark = [](std::size_t i) { return cat(answered, i, answered); };
    std::vector<std::size_t> marked;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      jinja::Dict fields = messages_[i].mapping().items;  // which others may refer to
      for (auto& [key, value] : fields)
        if (key.str() == "content" && value.is_true())
          value = as_taken(mark(i), mark(i)), marked.push_back(i);
      numbered.messages_[i] = Value::dict(std::move(fields));
    }
    try {
      const std::string text = numbered.text(false);
      for (const std::size_t i : marked)
        if (text.find(mark(i)) == std::string::npos) return i;
    } catch (const Error&) {  // of a text that it takes apart
    }
    return std::nullopt;
  }

  /// From left to right; none within another.
  std::vector<Control> controls_in(std::string_view text) const {
    std::vector<Control> out;
    for (const Tokenizer::Spelled& found : tokenizer_.special_tokens_in(text)) {
      const std::string token = tokenizer_.token(found.id);
      const std::size_t begin = std::min(text.find(token, found.begin), found.end - token.size());
      out.push_back({token, begin, begin + token.size(), found.begin, found.end});
    }
    for (const std::string& token : controls_) {
      const auto id = tokenizer_.token_id(token);
      if (id && tokenizer_.is_special(*id)) continue;
      add(out, text, token, token);
    }
    add(out, text, std::string(no_token), "");
    std::sort(out.begin(), out.end(), [](const Control& a, const Control& b) { return a.begin < b.begin; });
    return out;
  }

 private:
  std::string with(std::size_t which, Value message) {
    std::swap(messages_[which], message);
    try {
      std::string out = text(false);
      std::swap(messages_[which], message);
      return out;
    } catch (...) {
      std::swap(messages_[which], message);
      throw;
    }
  }
  /// The texts of a call's arguments are others.
  static Value changed(const Value& value, bool argument) {
    if (value.is_string()) return argument ? Value(answered) : value;
    if (value.is_list()) {
      jinja::List items;
      for (const Value& item : value.sequence().items) items.push_back(changed(item, argument));
      return Value::list(std::move(items), value.sequence().tuple);
    }
    if (!value.is_dict()) return value;
    jinja::Dict items;
    for (const auto& [key, item] : value.mapping().items)
      items.emplace_back(key, changed(item, argument || key.str() == "arguments"));
    return Value::dict(std::move(items));
  }
  Value saying(const Value& message, const std::string& content) const {
    return Value::dict({{"role", *message.find("role")}, {"content", as_taken(content, content)}});
  }
  /// A content, whose parts together are `text`.
  Value as_taken(const Value& content, const std::string& text) const {
    if (content.is_list() && content_ == Content::text) return guarded(text);
    if (content.is_string() && content_ == Content::parts)
      return Value::list({Value::dict({{"type", "text"}, {"text", content}})});
    return content;
  }
  static void add(std::vector<Control>& out, std::string_view text, const std::string& written,
                  const std::string& token) {
    for (std::size_t at = 0; (at = text.find(written, at)) != std::string_view::npos; at += written.size())
      out.push_back({token, at, at + written.size(), at, at + written.size()});
  }

  /// With a mark within each special token, so that those in what is written are the template's own.
  Value guarded(const Value& value) const {
    if (value.is_string()) return guarded(value.text());
    if (value.is_list()) {
      jinja::List items;
      for (const Value& item : value.sequence().items) items.push_back(guarded(item));
      return Value::list(std::move(items), value.sequence().tuple);
    }
    if (!value.is_dict()) return value;
    jinja::Dict items;
    for (const auto& [key, item] : value.mapping().items) items.emplace_back(guarded(key), guarded(item));
    return Value::dict(std::move(items));
  }
  std::string guarded(const std::string& text) const {
    for (const std::string_view mark : {apart, answered, no_token})
      if (text.find(mark) != std::string::npos)
        fail(ErrorKind::data,
             "a message has one of the characters U+FDD0 to U+FDD2, which no text may have: take it out");
    std::string out;
    std::size_t done = 0;
    for (const Control& control : controls_in(text)) {
      if (control.begin < done) continue;
      const std::size_t cut = control.begin + utf8_length(std::string_view(text).substr(control.begin));
      out.append(text, done, cut - done).append(apart);
      done = cut;
    }
    return out.append(text, done);
  }

  const jinja::Template& runs_;
  const jinja::Dict& tokens_;
  const Tokenizer& tokenizer_;
  const std::vector<std::string>& controls_;
  Content content_;
  jinja::List messages_;
  jinja::Dict names_;
};

bool begins_character(std::string_view text, std::size_t at) {
  return at >= text.size() || (static_cast<unsigned char>(text[at]) & 0xc0u) != 0x80u;
}

/// Where two texts differ, in the first one, whole characters.
jinja::Generated difference(std::string_view text, std::string_view other) {
  std::size_t begin = static_cast<std::size_t>(
      std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
  while (!begins_character(text, begin)) --begin;
  const std::size_t most = std::min(text.size(), other.size()) - begin;
  std::size_t same = 0;
  while (same < most && text[text.size() - 1 - same] == other[other.size() - 1 - same]) ++same;
  while (!begins_character(text, text.size() - same)) --same;
  return {begin, text.size() - same};
}

/// Behind what ends an answer that ends at `at`, the token or the text that does; else `at`.
std::size_t behind_end(std::string_view text, std::size_t at, const std::vector<Control>& controls,
                       const AnswerEnd& end) {
  for (const Control& control : controls)
    if (control.begin >= at) {
      if (is_space_alone(text.substr(at, control.begin - at))) return control.end;
      break;
    }
  for (const std::string& written : end.texts)
    if (text.substr(at).starts_with(written)) return at + written.size();
  return at;
}

/// How much of a text another one begins with, whole tokens and without white space at the end.
std::size_t common_front(std::string_view text, std::string_view other,
                         const std::vector<Control>& controls) {
  std::size_t same = static_cast<std::size_t>(
      std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
  while (!begins_character(text, same)) --same;
  for (const Control& control : controls)
    if (control.begin < same && same < control.end) same = control.begin;
  return without_python_space_behind(text.substr(0, same)).size();
}

/// Where an answer is written: from behind what asks for it, with what the template has the model write in
/// front, up to what ends it.
jinja::Generated answer_in(std::string_view text, std::size_t which, Writing& writing,
                           const std::vector<Control>& controls, const AnswerEnd& end) {
  jinja::Generated out = difference(text, writing.with_another(which));
  const auto written = [&](std::size_t count, bool asks) {
    try {
      return writing.text(count, asks);
    } catch (const Error&) {  // nobody can ask for it, as for an answer that comes first; or end there
      return std::string();
    }
  };
  if (const std::string asked = written(which, true);
      !asked.empty() && asked.size() <= out.begin && text.starts_with(asked))
    out.begin = asked.size();
  // Behind the arguments of a call there is more that belongs to it.
  if (writing.calls(which))
    out.end = std::max(out.end, common_front(text, written(which + 1, false), controls));
  const auto ends = [&](const Control& control) { return control.end == out.end; };
  if (std::none_of(controls.begin(), controls.end(), ends))
    out.end = behind_end(text, out.end, controls, end);
  return out;
}

bool is_answer(const ChatMessage& message) {
  return message.role == "assistant";
}

/// Of what the template marks as answers, those that are learned.
std::vector<jinja::Generated> learned_of(std::vector<jinja::Generated> marked,
                                         const std::vector<ChatMessage>& messages) {
  std::vector<bool> learned;
  for (const ChatMessage& message : messages)
    if (is_answer(message)) learned.push_back(message.learned);
  if (std::all_of(learned.begin(), learned.end(), [](bool is) { return is; })) return marked;
  if (marked.size() != learned.size())
    fail(ErrorKind::data, "some answers are not to be learned, and the template's {% generation %} marks ",
         marked.size(), " parts of ", learned.size(), " answers, so that nobody knows which");
  std::vector<jinja::Generated> out;
  for (std::size_t i = 0; i < marked.size(); ++i)
    if (learned[i]) out.push_back(marked[i]);
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
      for (std::size_t at; (at = segment.text.find(apart)) != std::string::npos;)
        segment.text.erase(at, apart.size());
      out_.push_back(std::move(segment));
      begin = next;
    }
  }

  std::string_view text_;
  const std::vector<jinja::Generated>& learned_;
  std::vector<TextSegment> out_;
};

/// Whether a template has a word anywhere, as what it writes it must name.
bool names(std::string_view text, std::string_view name) {
  const auto in_word = [&](std::size_t at) {
    const char c = at < text.size() ? text[at] : ' ';
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  for (std::size_t at = 0; (at = text.find(name, at)) != std::string_view::npos; ++at)
    if (!in_word(at - 1) && !in_word(at + name.size())) return true;
  return false;
}

}  // namespace

void ChatTemplate::State::find_content() {
  const auto writes = [&](Content as, const std::string& text_in_quotes) {
    content = as;
    try {
      Writing writing(*this, {{{"user", "a"}}});
      const std::string written = writing.with(0, std::string(answered));
      return written.find(answered) != std::string::npos && written.find(text_in_quotes) == std::string::npos;
    } catch (const Error&) {
      return false;
    }
  };
  // A list that is taken for a text is written as Python, or JSON, shows it.
  const bool parts = writes(Content::parts, cat("'", answered)) && writes(Content::parts, cat('"', answered)),
             whole = writes(Content::text, "\x01");
  content = parts && whole ? Content::either : parts ? Content::parts : Content::text;
}

void ChatTemplate::State::find_answer_end() {
  answer_end.ids = {tokenizer.end_of_document()};
  try {
    Writing writing(*this, {{{"user", "a"}, {"assistant", "b"}}});
    const std::string text = writing.with(1, std::string(answered));
    const std::size_t at = text.find(answered), behind = at + answered.size();
    if (at == std::string::npos) return;
    if (const std::string asked = writing.text(1, true);
        asked.size() <= at && text.starts_with(asked) &&
        is_space_alone(std::string_view(text).substr(asked.size(), at - asked.size())))
      before_answer = text.substr(asked.size(), at - asked.size());
    const std::vector<Control> controls = writing.controls_in(text);
    const std::size_t end = behind_end(text, behind, controls, {});
    const auto is_end = [&](const Control& control) { return control.end == end; };
    if (const auto control = std::find_if(controls.begin(), controls.end(), is_end);
        control != controls.end()) {
      const auto id =
          control->token.empty() ? tokenizer.end_of_document() : tokenizer.token_id(control->token);
      if (!id)
        answer_end.texts.push_back(control->token);
      else if (*id != tokenizer.end_of_document())
        answer_end.ids.push_back(*id);
    } else if (const std::string_view rest =
                   without_python_space_behind(std::string_view(text).substr(behind));
               !rest.empty()) {
      answer_end.texts.emplace_back(rest);
    }
  } catch (const Error&) {  // which no such conversation tells
  }
}

void ChatTemplate::State::check(const Conversation& conversation) const {
  if (conversation.messages.empty()) fail(ErrorKind::data, "a conversation without messages");
  for (const ChatMessage& message : conversation.messages) {
    if (builtin && message.role != "system" && message.role != "user" && !is_answer(message))
      fail(ErrorKind::data, "a message has the role '", excerpt(message.role), "'; the template ", spec,
           " is of system, user and assistant: say it as one of these, or leave the line out");
    // What a tool's message answers stands in front of it.
    const auto refers = [&](const std::string& key) {
      return message.role == "tool" && (key == "tool_call_id" || key == "name");
    };
    for (const auto& [key, value] : message.beside)
      if (const std::string name = key.str(); name != "content" && !refers(name) && !names(text, name)) {
        const std::string close =
            nearest(name, std::vector<std::string>{"role", "content", "weight", "train", "loss"});
        fail(ErrorKind::data, "a message has '", excerpt(name), "'",
             close.empty() ? ", which the template does not write; take it out, or write it into 'content'"
                           : cat("; did you mean '", close, "'?"));
      }
  }
  for (const auto& [key, value] : conversation.names)
    if (!names(text, key.str()))
      fail(ErrorKind::data, "has '", excerpt(key.str()),
           "' beside its messages, which the template does not write; take it out");
}

ChatTemplate ChatTemplate::make(std::string spec, std::string text, jinja::Dict tokens,
                                const Tokenizer& tokenizer) {
  const auto add = [&](const char* name, std::string token) {
    const auto is = [name](const auto& pair) { return pair.first.str() == name; };
    if (std::none_of(tokens.begin(), tokens.end(), is)) tokens.emplace_back(name, std::move(token));
  };
  const std::string end = tokenizer.token(tokenizer.end_of_document());
  add("eos_token", end.empty() ? std::string(no_token) : end);
  if (const auto begin = tokenizer.begin_of_document()) add("bos_token", tokenizer.token(*begin));
  const bool builtin = !spec.starts_with('{');
  std::vector<std::string> controls = builtin ? controls_of(spec) : std::vector<std::string>();
  try {
    jinja::Template runs(text);
    auto state = std::make_shared<State>(State{std::move(spec), std::move(text), builtin, std::move(runs),
                                               std::move(tokens), tokenizer, std::move(controls)});
    state->find_content();
    state->find_answer_end();
    return ChatTemplate(std::move(state));
  } catch (const Error& error) {
    fail(ErrorKind::config, "the chat template is not read: ", error.what());
  }
}

ChatTemplate ChatTemplate::named(const std::string& name, const Tokenizer& tokenizer) {
  const std::vector<std::string>& all = builtin_templates();
  if (std::find(all.begin(), all.end(), name) != all.end())
    return make(name, jinja_of(name, tokenizer), {}, tokenizer);
  const std::string close = nearest(name, all);
  fail(ErrorKind::config, "there is no chat template '", excerpt(name),
       "'; give chatml, llama3, mistral or plain",
       close.empty() ? std::string() : cat(" (did you mean '", close, "'?)"));
}

ChatTemplate ChatTemplate::of_text(const std::string& text, jinja::Dict tokens, const Tokenizer& tokenizer) {
  nlohmann::ordered_json spec{{"template", text}};
  for (const auto& [name, token] : tokens) spec[name.str()] = token.str();
  return make(spec.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), text,
              std::move(tokens), tokenizer);
}

ChatTemplate ChatTemplate::of_spec(const std::string& spec, const Tokenizer& tokenizer) {
  if (!spec.starts_with('{')) return named(spec, tokenizer);
  const auto object = nlohmann::ordered_json::parse(spec, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("template"))
    fail(ErrorKind::data, "a chat template was saved that is none: '", excerpt(spec), "'");
  jinja::Dict tokens;
  for (const auto& [name, token] : object.items())
    if (name != "template") tokens.emplace_back(name, token.get<std::string>());
  return of_text(object["template"].get<std::string>(), std::move(tokens), tokenizer);
}

ChatTemplate ChatTemplate::by_tokens(const Tokenizer& tokenizer) {
  for (const auto& [token, name] :
       {std::pair("<|im_start|>", "chatml"), {"<|start_header_id|>", "llama3"}, {"[INST]", "mistral"}})
    if (tokenizer.token_id(token)) return named(name, tokenizer);
  return named("plain", tokenizer);
}

const std::string& ChatTemplate::spec() const {
  return state_->spec;
}
std::string ChatTemplate::name() const {
  return name_of_spec(state_->spec);
}
const std::string& ChatTemplate::text() const {
  return state_->text;
}
const Tokenizer& ChatTemplate::tokenizer() const {
  return state_->tokenizer;
}
const AnswerEnd& ChatTemplate::answer_end() const {
  return state_->answer_end;
}
const std::string& ChatTemplate::before_answer() const {
  return state_->before_answer;
}

std::vector<TextSegment> ChatTemplate::render(const Conversation& conversation) const {
  state_->check(conversation);
  const std::vector<ChatMessage>& messages = conversation.messages;
  Writing writing(*state_, conversation);
  std::vector<jinja::Generated> learned;
  const std::string text = writing.text(false, &learned);
  if (const auto dropped = state_->builtin ? std::nullopt : writing.dropped())
    fail(ErrorKind::data, "the template writes nothing of message ", *dropped + 1, " (of the ",
         excerpt(messages[*dropped].role), "): leave the line out, or say it in another");
  const std::vector<Control> controls = writing.controls_in(text);
  if (state_->runs.marks_answers()) {
    learned = learned_of(std::move(learned), messages);
  } else {
    for (std::size_t i = 0; i < messages.size(); ++i)
      if (is_answer(messages[i]) && messages[i].learned)
        learned.push_back(answer_in(text, i, writing, controls, state_->answer_end));
  }
  std::vector<TextSegment> out = Cutter(text, controls, learned).take();
  // Nothing tells the end of such an answer but that of the document.
  if (!learned.empty() && is_space_alone(std::string_view(text).substr(learned.back().end)) &&
      std::none_of(controls.begin(), controls.end(),
                   [&](const Control& control) { return control.end == learned.back().end; }))
    out.push_back({"", true, SegmentKind::end});
  return out;
}

std::vector<TextSegment> ChatTemplate::render_question(const Conversation& conversation) const {
  state_->check(conversation);
  const std::string& last = conversation.messages.back().role;
  if (last == "assistant" || (state_->builtin && last != "user"))
    fail(ErrorKind::data, "a conversation ends with a message of the ", last,
         "; what is to be answered is the user's, and comes last");
  const Writing writing(*state_, conversation);
  const std::string text = writing.text(true);
  return Cutter(text, writing.controls_in(text), {}).take();
}

}  // namespace sherd::data
