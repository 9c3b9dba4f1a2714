#include "data/text/example.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/text/conversation_json.h"
#include "data/text/json_line.h"
#include "data/text/preference_json.h"

namespace sherd::data {
namespace {

using Json = nlohmann::ordered_json;

Example completion(const Json& object, const char* answer_key, const ExampleOptions& options) {
  const Json &prompt = object["prompt"], &answer = object[answer_key];
  if (prompt.is_string() && answer.is_string())
    return completion_example(prompt.get<std::string>(), answer.get<std::string>(), options);
  if (!prompt.is_array() || !answer.is_array())
    fail(ErrorKind::data, "'prompt' and '", answer_key,
         "' are neither two strings nor two lists of messages");
  Conversation of{{}, names_beside(object)};
  append_messages(prompt, false, of.messages);
  append_messages(answer, true, of.messages);
  return conversation_example(of, options);
}

Example example_of(const Json& object, const ExampleOptions& options) {
  if (options.text_field.empty()) {
    if (const auto found = conversation_in(object)) return conversation_example(*found, options);
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

Example conversation_example(const Conversation& conversation, const ExampleOptions& options) {
  if (!options.chat_template) fail(ErrorKind::config, "is a conversation: ", options.no_template);
  return {options.chat_template->render(conversation), true, true};
}

Example completion_example(const std::string& prompt, const std::string& answer,
                           const ExampleOptions& options) {
  Example example;
  example.marked = true;
  example.segments = {{prompt, false, SegmentKind::text},
                      {"", false, options.apart ? SegmentKind::apart : SegmentKind::text},
                      {answer, true, SegmentKind::text},
                      {"", true, SegmentKind::end}};
  return example;
}

std::vector<Example> read_examples(const std::string& line, const ExampleOptions& options,
                                   const std::filesystem::path& file, std::int64_t line_number) {
  return at_line(file, line_number, [&] {
    const Json object = Json::parse(line);
    if (!object.is_object()) fail(ErrorKind::data, "is no JSON object");
    if (options.text_field.empty())
      if (std::vector<Example> pairs = preferences_in(object, options); !pairs.empty()) return pairs;
    return std::vector<Example>{example_of(object, options)};
  });
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
