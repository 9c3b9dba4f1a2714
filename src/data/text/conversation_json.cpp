#include "data/text/conversation_json.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

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

/// A turn of ShareGPT's as a message.
Json message_of_turn(const Json& turn) {
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
  return message;
}

void append_system(const Json& object, std::vector<ChatMessage>& messages) {
  if (std::string system = text_at(object, "system"); !system.empty())
    messages.push_back({"system", std::move(system)});
}

const Json& list_in(const Json& object, const char* key) {
  if (!object[key].is_array()) fail(ErrorKind::data, "'", key, "' is no list");
  return object[key];
}

/// ShareGPT's turns, or messages under that name.
void append_conversations(const Json& object, bool learned, std::vector<ChatMessage>& messages) {
  const Json& list = list_in(object, "conversations");
  append_system(object, messages);
  const bool turns =
      list.empty() || !list[0].is_object() || !list[0].contains("role") || list[0].contains("from");
  for (const Json& each : list) messages.push_back(message_of(turns ? message_of_turn(each) : each, learned));
}

/// Alpaca's, without the answer.
void append_asked(const Json& object, std::vector<ChatMessage>& messages) {
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
}

}  // namespace

template <class Object>
bool has(const Object& object, const char* key) {
  return object.contains(key) && !object[key].is_null();
}

template <class Object>
std::string text_at(const Object& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (!found->is_string()) fail(ErrorKind::data, "'", key, "' is no text: ", excerpt(found->dump()));
  return found->template get<std::string>();
}

template <class Object>
ChatMessage message_in(const Object& object, bool learned) {
  const bool turn = object.is_object() && object.contains("from") && !object.contains("role");
  return message_of(turn ? message_of_turn(object) : object, learned);
}

template <class Object>
void append_messages(const Object& list, bool learned, std::vector<ChatMessage>& messages) {
  for (const Json& message : list) messages.push_back(message_in(message, learned));
}

template <class Object>
jinja::Dict names_beside(const Object& object) {
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

template <class Object>
std::optional<Conversation> conversation_in(const Object& object) {
  Conversation out;
  if (has(object, "messages")) {
    append_messages(list_in(object, "messages"), true, out.messages);
  } else if (has(object, "conversations")) {
    append_conversations(object, true, out.messages);
  } else if (has(object, "instruction") && has(object, "output")) {
    if (has(object, "text"))
      fail(ErrorKind::data,
           "has 'text' beside 'instruction' and 'output': take one out, or say --json-field text");
    append_asked(object, out.messages);
    out.messages.push_back({"assistant", text_at(object, "output")});
  } else {
    return std::nullopt;
  }
  out.names = names_beside(object);
  return out;
}

template <class Object>
std::vector<ChatMessage> asked_in(const Object& object) {
  std::vector<ChatMessage> out;
  if (has(object, "messages"))
    append_messages(list_in(object, "messages"), false, out);
  else if (has(object, "conversations"))
    append_conversations(object, false, out);
  else if (has(object, "instruction"))
    append_asked(object, out);
  for (ChatMessage& message : out) message.learned = false;
  return out;
}

template bool has(const Json&, const char*);
template std::string text_at(const Json&, const char*);
template ChatMessage message_in(const Json&, bool);
template void append_messages(const Json&, bool, std::vector<ChatMessage>&);
template jinja::Dict names_beside(const Json&);
template std::optional<Conversation> conversation_in(const Json&);
template std::vector<ChatMessage> asked_in(const Json&);

}  // namespace sherd::data
