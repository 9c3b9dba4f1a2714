#include "data/text/example.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/text/json_line.h"

namespace sherd::data {
namespace {

using Json = nlohmann::ordered_json;

/// Keys without a value are those that a table of another line has.
bool is_empty(const Json& value) {
  return value.is_null() || value == "" || ((value.is_array() || value.is_object()) && value.empty());
}

/// Lists and objects within each other that are read.
constexpr int most_levels = 100;

jinja::Value value_of(const Json& json, int levels = most_levels) {
  using jinja::Value;
  if (levels == 0)
    fail(ErrorKind::data, "lists and objects lie more than ", most_levels, " deep within each other");
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_unsigned:
      if (json.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        return json.get<double>();
      [[fallthrough]];
    case Json::value_t::number_integer:
      return json.get<std::int64_t>();
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return json.get<std::string>();
    case Json::value_t::array: {
      jinja::List items;
      for (const Json& item : json) items.push_back(value_of(item, levels - 1));
      return Value::list(std::move(items));
    }
    case Json::value_t::object: {
      jinja::Dict items;
      for (const auto& [key, item] : json.items()) items.emplace_back(key, value_of(item, levels - 1));
      return Value::dict(std::move(items));
    }
    default:
      return jinja::None{};
  }
}

/// The texts of a list of parts ({"type": "text", "text": …}).
std::string text_of_parts(const Json& parts) {
  std::string text;
  for (const Json& part : parts) {
    if (!part.is_object() || !part.contains("text") || !part["text"].is_string() ||
        part.value("type", Json("text")) != "text")
      fail(ErrorKind::data, "a message's 'content' has a part that is no text; models here read text alone");
    for (const auto& [key, value] : part.items())
      if (key != "type" && key != "text" && !is_empty(value))
        fail(ErrorKind::data, "a part of a message's 'content' has '", excerpt(key),
             "', which no template writes; take it out, or write it into 'text'");
    text += part["text"].get<std::string>();
  }
  return text;
}

/// Whether a message says that it is to be learned: OpenAI's `weight`, and what other trainers call it.
bool says_learned(const Json& message) {
  bool learned = true;
  if (const auto weight = message.find("weight"); weight != message.end() && !weight->is_null()) {
    if (!weight->is_number() || (*weight != 0 && *weight != 1))
      fail(ErrorKind::data, "a message's 'weight' is 0 or 1, not ", excerpt(weight->dump()));
    learned = *weight == 1;
  }
  for (const char* key : {"train", "loss"})
    if (const auto said = message.find(key); said != message.end() && !said->is_null()) {
      if (!said->is_boolean())
        fail(ErrorKind::data, "a message's '", key, "' is true or false, not ", excerpt(said->dump()));
      learned = learned && said->get<bool>();
    }
  return learned;
}

ChatMessage message_of(const Json& message, bool learned) {
  if (!message.is_object() || !message.contains("role") || !message["role"].is_string())
    fail(ErrorKind::data, "a message is no object with a string 'role'");
  ChatMessage out{message["role"].get<std::string>(), "", says_learned(message) && learned};
  constexpr std::array<std::string_view, 5> own{"role", "content", "weight", "train", "loss"};
  for (const auto& [key, value] : message.items())
    if (std::find(own.begin(), own.end(), key) == own.end() && !is_empty(value))
      out.beside.emplace_back(key, value_of(value));
  const auto content = message.find("content");
  if (content != message.end() && content->is_string())
    out.content = content->get<std::string>();
  else if (content != message.end() && content->is_array())
    out.content = text_of_parts(*content), out.beside.emplace_back("content", value_of(*content));
  else if ((content == message.end() || content->is_null()) && !out.beside.empty())
    out.beside.emplace_back("content", jinja::None{});  // as of a message that calls a tool
  else
    fail(ErrorKind::data, "a message has no string 'content'");
  return out;
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (!found->is_string()) fail(ErrorKind::data, "'", key, "' is no text: ", excerpt(found->dump()));
  return found->get<std::string>();
}

/// ShareGPT's names of those who speak.
std::string role_of(const std::string& from) {
  for (const auto& [role, names] :
       {std::pair<const char*, std::vector<std::string_view>>{"user", {"human", "user"}},
        {"assistant", {"gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"}},
        {"system", {"system"}},
        {"tool", {"tool", "observation", "function_response"}}})
    if (std::find(names.begin(), names.end(), from) != names.end()) return role;
  fail(ErrorKind::data, "a turn is from '", excerpt(from),
       "'; known are human, user, gpt, assistant, chatgpt, bing, bard, model, function_call, system, tool, "
       "observation and function_response");
}

void append_turns(const Json& list, std::vector<ChatMessage>& messages) {
  for (const Json& turn : list) {
    if (!turn.is_object() || !turn.contains("from") || !turn.contains("value") || !turn["from"].is_string() ||
        !turn["value"].is_string())
      fail(ErrorKind::data, "a turn of 'conversations' is no object with texts 'from' and 'value'");
    Json message{{"role", role_of(turn["from"].get<std::string>())}, {"content", turn["value"]}};
    for (const auto& [key, value] : turn.items()) {
      if (key == "from" || key == "value" || is_empty(value)) continue;
      if (message.contains(key))
        fail(ErrorKind::data, "a turn of 'conversations' has '", key, "' beside 'from' and 'value'");
      message[key] = value;
    }
    messages.push_back(message_of(message, true));
  }
}

void append_system(const Json& object, std::vector<ChatMessage>& messages) {
  if (std::string system = text_at(object, "system"); !system.empty())
    messages.push_back({"system", std::move(system)});
}

void append_instruction(const Json& object, std::vector<ChatMessage>& messages) {
  append_system(object, messages);
  if (const auto history = object.find("history"); history != object.end() && !is_empty(*history))
    for (const Json& pair : history->is_array() ? *history : Json::array({*history})) {
      if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string())
        fail(ErrorKind::data, "'history' is no list of pairs of texts");
      messages.push_back({"user", pair[0].get<std::string>()});
      messages.push_back({"assistant", pair[1].get<std::string>()});
    }
  const std::string input = text_at(object, "input");
  messages.push_back({"user", text_at(object, "instruction") + (input.empty() ? "" : "\n") + input});
  messages.push_back({"assistant", text_at(object, "output")});
}

const Json& list_in(const Json& object, const char* key) {
  if (!object[key].is_array()) fail(ErrorKind::data, "'", key, "' is no list");
  return object[key];
}

/// `learned`: false, and no answer is.
void append_messages(const Json& list, bool learned, std::vector<ChatMessage>& messages) {
  for (const Json& message : list) messages.push_back(message_of(message, learned));
}

/// What stands beside the messages and is for the template.
jinja::Dict names_beside(const Json& object) {
  jinja::Dict out;
  for (const char* key : {"tools", "functions", "documents"})
    if (const auto found = object.find(key); found != object.end() && !is_empty(*found)) {
      if (!found->is_array()) fail(ErrorKind::data, "'", key, "' is no list");
      out.emplace_back(key, value_of(*found));
    }
  if (const auto found = object.find("chat_template_kwargs"); found != object.end() && !is_empty(*found)) {
    if (!found->is_object()) fail(ErrorKind::data, "'chat_template_kwargs' is no object");
    for (const auto& [key, value] : found->items()) out.emplace_back(key, value_of(value));
  }
  return out;
}

/// The conversation that an object is, or nothing where its keys are others.
std::optional<Conversation> conversation_in(const Json& object) {
  Conversation out;
  const auto has = [&](const char* key) { return object.contains(key) && !object[key].is_null(); };
  if (has("messages")) {
    append_messages(list_in(object, "messages"), true, out.messages);
  } else if (has("conversations")) {
    const Json& list = list_in(object, "conversations");
    append_system(object, out.messages);
    if (!list.empty() && list[0].is_object() && list[0].contains("role") && !list[0].contains("from"))
      append_messages(list, true, out.messages);
    else
      append_turns(list, out.messages);
  } else if (has("instruction") && has("output")) {
    if (has("text"))
      fail(ErrorKind::data,
           "has 'text' beside 'instruction' and 'output': take one out, or say --json-field text");
    append_instruction(object, out.messages);
  } else {
    return std::nullopt;
  }
  out.names = names_beside(object);
  return out;
}

Example conversation(const Conversation& of, const ExampleOptions& options) {
  if (!options.chat_template) fail(ErrorKind::config, "is a conversation: ", options.no_template);
  return {options.chat_template->render(of), true, true};
}

Example completion(const Json& object, const char* answer_key, const ExampleOptions& options) {
  const Json &prompt = object["prompt"], &answer = object[answer_key];
  if (prompt.is_string() && answer.is_string()) {
    Example example;
    example.marked = true;
    example.segments = {{prompt.get<std::string>(), false, SegmentKind::text},
                        {"", false, options.apart ? SegmentKind::apart : SegmentKind::text},
                        {answer.get<std::string>(), true, SegmentKind::text},
                        {"", true, SegmentKind::end}};
    return example;
  }
  if (!prompt.is_array() || !answer.is_array())
    fail(ErrorKind::data, "'prompt' and '", answer_key,
         "' are neither two strings nor two lists of messages");
  Conversation of{{}, names_beside(object)};
  append_messages(prompt, false, of.messages);
  append_messages(answer, true, of.messages);
  return conversation(of, options);
}

Example example_of(const Json& object, const ExampleOptions& options) {
  if (!object.is_object()) fail(ErrorKind::data, "is no JSON object");
  if (options.text_field.empty()) {
    if (const auto found = conversation_in(object)) return conversation(*found, options);
    for (const char* answer : {"completion", "response"})
      if (object.contains("prompt") && object.contains(answer)) return completion(object, answer, options);
  }
  const std::string field = options.text_field.empty() ? "text" : options.text_field;
  const auto text = object.find(field);
  if (text == object.end() || !text->is_string())
    fail(ErrorKind::data, "has no string '", excerpt(field), "'",
         options.text_field.empty()
             ? ", no 'messages', 'conversations' or 'instruction' with 'output', and no "
               "'prompt' with 'completion'"
             : "",
         "; name the field that holds the text, by --json-field (keys: ", keys_of(object), ")");
  return {{{text->get<std::string>(), true, SegmentKind::text}}};
}

}  // namespace

bool Example::teaches() const {
  return std::any_of(segments.begin(), segments.end(), [](const TextSegment& s) { return s.learned; });
}

Example read_example(const std::string& line, const ExampleOptions& options,
                     const std::filesystem::path& file, std::int64_t line_number) {
  return at_line(file, line_number, [&] { return example_of(Json::parse(line), options); });
}

Conversation read_conversation(const std::string& line, const std::filesystem::path& file,
                               std::int64_t line_number) {
  return at_line(file, line_number, [&] {
    const Json object = Json::parse(line);
    const auto found = object.is_object() ? conversation_in(object) : std::nullopt;
    if (!found) fail(ErrorKind::data, "has no list 'messages'");
    return *found;
  });
}

std::string text_of(const Example& example) {
  std::string text;
  for (const TextSegment& segment : example.segments)
    if (segment.kind == SegmentKind::text) text += segment.text;
  return text;
}

}  // namespace sherd::data
