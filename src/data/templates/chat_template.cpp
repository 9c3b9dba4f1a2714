#include "data/templates/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/hugging_face/steps/unicode.h"
#include "data/templates/answers.h"

namespace sherd::data {

struct ChatTemplate::State : TemplateRun {
  std::string spec, text;
  jinja::Dict given;
  bool builtin;
  AnswerEnd answer_end = {};
  std::string before_answer = {};

  void find_content();
  void find_answer_end();
  void check(const Conversation& conversation) const;
  void require_written(const WrittenConversation& written, const Conversation& conversation) const;
};

namespace {

/// The parts to be learned among those that the template marks as answers.
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
  bool refused = false;
  const auto writes = [&](Content as, const std::string& text_in_quotes) {
    content = as;
    try {
      WrittenConversation by_parts(*this, {{{"user", "a"}}});
      const std::string all = by_parts.with(0, std::string(mark_answer));
      return all.find(mark_answer) != std::string::npos && all.find(text_in_quotes) == std::string::npos;
    } catch (const Error&) {
      refused = true;
      return false;
    }
  };
  // A list that is taken for a text is written as Python, or JSON, shows it.
  const bool parts = writes(Content::parts, cat("'", mark_answer)) &&
                     writes(Content::parts, cat('"', mark_answer)),
             whole = writes(Content::text, "\x01");
  if (!parts && !whole && !refused)
    fail(ErrorKind::config, "it writes nothing of a message: is it a chat template?");
  content = parts && whole ? Content::either : parts ? Content::parts : Content::text;
}

void ChatTemplate::State::find_answer_end() {
  answer_end.ids = {tokenizer.end_of_document()};
  try {
    const std::string asked =
        WrittenConversation(*this, {{{"user", "a"}}}).with(0, std::string(mark_answer), true);
    if (const std::size_t at = asked.rfind(mark_answer); at != std::string::npos)
      lead = asked.substr(at + mark_answer.size());
  } catch (const Error&) {  // which takes no such question
  }
  // Where nothing stands behind an answer, the next turn begins there.
  for (const Conversation& talk : {Conversation{{{"user", "a"}, {"assistant", "b"}}},
                                   Conversation{{{"user", "a"}, {"assistant", "b"}, {"user", "c"}}}})
    try {
      WrittenConversation written(*this, talk);
      const std::string all = written.with(1, std::string(mark_answer));
      const std::size_t at = all.find(mark_answer), behind = at + mark_answer.size();
      if (at == std::string::npos) return;
      const std::string_view view = all;
      if (const std::string asked = written.text(1, true);
          asked.size() <= at && view.starts_with(asked) &&
          is_space_alone(view.substr(asked.size(), at - asked.size())))
        before_answer = all.substr(asked.size(), at - asked.size());
      const std::vector<Control> found = controls_in(*this, all);
      const std::size_t end = behind_end(all, behind, found, {});
      const auto control =
          std::find_if(found.begin(), found.end(), [&](const Control& c) { return c.end == end; });
      if (control != found.end()) {
        const auto id =
            control->token.empty() ? tokenizer.end_of_document() : tokenizer.token_id(control->token);
        answer_end.token = control->token;
        for (auto next = control + 1; talk.messages.size() == 2 && next != found.end(); ++next)
          if (next->begin == (next - 1)->end) answer_end.closing.push_back(next->token);
        if (!id)
          answer_end.texts.push_back(control->token);
        else if (*id != tokenizer.end_of_document())
          answer_end.ids.push_back(*id);
        return;
      }
      if (talk.messages.size() > 2) return;
      if (const std::string_view rest = without_python_space_behind(view.substr(behind)); !rest.empty()) {
        answer_end.texts.emplace_back(rest);
        return;
      }
    } catch (const Error&) {  // which no such conversation tells
      return;
    }
}

void ChatTemplate::State::check(const Conversation& conversation) const {
  if (conversation.messages.empty()) fail(ErrorKind::data, "a conversation without messages");
  for (const ChatMessage& message : conversation.messages) {
    if (builtin && message.role != "system" && message.role != "user" && !is_answer(message))
      fail(ErrorKind::data, "a message has the role '", excerpt(message.role), "'; the template ", spec,
           " is of system, user and assistant: say it as one of these, or leave the line out");
    // The template need not write which call a tool's message answers: the call stands in front of it.
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
      fail(ErrorKind::data, "gives the template '", excerpt(key.str()),
           "' beside the messages, which it does not name; take it out");
  for (const auto& [key, value] : conversation.names) {
    const std::string name = key.str();
    if (name == "messages" || name == "add_generation_prompt" || name.ends_with("_token"))
      fail(ErrorKind::data, "'chat_template_kwargs' has '", excerpt(name),
           "', which the template is given anyway; take it out");
  }
}

void ChatTemplate::State::require_written(const WrittenConversation& written,
                                          const Conversation& conversation) const {
  if (builtin) return;
  if (const auto dropped = dropped_message(written))
    fail(ErrorKind::data, "the template writes nothing of message ", *dropped + 1, " (of the ",
         excerpt(conversation.messages[*dropped].role), "): leave the line out, or say it in another");
}

ChatTemplate ChatTemplate::make(std::string spec, std::string text, jinja::Dict tokens,
                                const Tokenizer& tokenizer) {
  jinja::Dict given = tokens;
  const auto add = [&](const char* name, std::string token) {
    const auto is = [name](const auto& pair) { return pair.first.str() == name; };
    if (std::none_of(tokens.begin(), tokens.end(), is)) tokens.emplace_back(name, std::move(token));
  };
  const std::string end = tokenizer.token(tokenizer.end_of_document());
  const std::vector<Tokenizer::Spelled> found = tokenizer.special_tokens_in(end);
  const bool is_found = found.size() == 1 && found[0].id == tokenizer.end_of_document();
  add("eos_token", is_found ? end : std::string(mark_end));
  if (const auto begin = tokenizer.begin_of_document()) add("bos_token", tokenizer.token(*begin));
  const bool builtin = !spec.starts_with('{');
  std::vector<std::string> controls = builtin ? controls_of(spec) : std::vector<std::string>();
  try {
    jinja::Template runs(builtin ? jinja_of(spec, tokenizer, true) : text);
    auto state =
        std::make_shared<State>(State{{std::move(runs), std::move(tokens), tokenizer, std::move(controls)},
                                      std::move(spec),
                                      std::move(text),
                                      std::move(given),
                                      builtin});
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
  const auto is_text = [](const auto& value) { return value.is_string(); };
  if (!object.is_object() || !object.contains("template") ||
      !std::all_of(object.begin(), object.end(), is_text))
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
const jinja::Dict& ChatTemplate::given_tokens() const {
  return state_->given;
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
  WrittenConversation written(*state_, conversation);
  std::vector<jinja::Generated> learned;
  const std::string text = written.text(false, &learned);
  state_->require_written(written, conversation);
  const std::vector<Control> controls = controls_in(*state_, text);
  written.require_own_controls(controls, false);
  learned = state_->runs.marks_answers() && !learned.empty()
                ? learned_of(std::move(learned), conversation.messages)
                : find_answers(written, *state_, conversation.messages, text, controls, state_->answer_end);
  std::vector<TextSegment> out = segments_of(text, controls, learned);
  // Nothing tells the end of such an answer but that of the document.
  const std::string_view view = text;
  if (!learned.empty() && is_space_alone(view.substr(learned.back().end))) {
    const std::size_t end = without_python_space_behind(view.substr(0, learned.back().end)).size();
    if (std::none_of(controls.begin(), controls.end(), [end](const Control& c) { return c.end == end; }))
      out.push_back({"", true, SegmentKind::end});
  }
  return out;
}

std::vector<TextSegment> ChatTemplate::render_question(const Conversation& conversation) const {
  state_->check(conversation);
  const std::string& last = conversation.messages.back().role;
  if (last == "assistant" || (state_->builtin && last != "user"))
    fail(ErrorKind::data, "a conversation ends with a message of the ", last,
         "; what is to be answered is the user's, and comes last");
  const WrittenConversation written(*state_, conversation);
  const std::string text = written.text(true);
  state_->require_written(written, conversation);
  const std::vector<Control> controls = controls_in(*state_, text);
  written.require_own_controls(controls, true);
  return segments_of(text, controls, {});
}

}  // namespace sherd::data
