#include "data/text/preference_json.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

/// Answers to one prompt from which pairs are made: 32 give 496.
constexpr std::size_t most_ranked = 32;

/// What is asked, in one of two forms.
struct Prompt {
  std::optional<std::string> text;
  std::vector<ChatMessage> messages;
};

Prompt prompt_in(const Json& object) {
  if (!has(object, "prompt")) return {{}, asked_in(object)};
  const Json& prompt = object["prompt"];
  if (prompt.is_string()) return {prompt.get<std::string>(), {}};
  if (!prompt.is_array()) fail(ErrorKind::data, "'prompt' is neither a string nor a list of messages");
  Prompt out;
  append_messages(prompt, false, out.messages);
  return out;
}

Example with_side(Example example, Side side) {
  example.side = side;
  return example;
}

/// The text that ends with `answer`, named `key`: a string, a message, or a list of them.
Example example_of(const Json& object, const Prompt& prompt, const Json& answer, const char* key,
                   const ExampleOptions& options) {
  if (answer.is_string() && prompt.messages.empty())
    return completion_example(prompt.text.value_or(""), answer.get<std::string>(), options);
  Conversation of{prompt.messages, names_beside(object)};
  if (prompt.text) of.messages.push_back({"user", *prompt.text, false});
  if (answer.is_string())
    of.messages.push_back({"assistant", answer.get<std::string>()});
  else if (answer.is_array())
    append_messages(answer, true, of.messages);
  else if (answer.is_object())
    of.messages.push_back(message_in(answer, true));
  else
    fail(ErrorKind::data, "'", key, "' is neither a string, a message, nor a list of messages");
  return conversation_example(of, options);
}

/// What two texts begin with, without a space at its end, as TRL's extract_prompt() finds it; each keeps a
/// byte at least, and no character is cut.
std::size_t common_text(const std::string& a, const std::string& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t same = 0;
  while (same < most && a[same] == b[same]) ++same;
  if (same == most && most > 0) --same;
  while (same > 0 && (static_cast<unsigned char>(a[same]) & 0xC0) == 0x80) --same;
  if (same > 0 && a[same - 1] == ' ') --same;
  return same;
}

/// Messages that two lists begin with, but for the last of each.
std::size_t common_messages(const Json& a, const Json& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t same = 0;
  while (same + 1 < most && a[same] == b[same]) ++same;
  return same;
}

/// Whether a list of messages begins with what is asked, and not with the answer.
bool begins_with_question(const Json& list) {
  if (!list.is_array() || list.empty() || !list[0].is_object()) return false;
  for (const char* key : {"role", "from"})
    if (list[0].contains(key))
      return list[0][key] == "user" || list[0][key] == "human" || list[0][key] == "system" ||
             list[0][key] == "developer";
  return false;
}

std::vector<Example> pair(const Json& object, const ExampleOptions& options) {
  const Json &chosen = object["chosen"], &rejected = object["rejected"];
  if (chosen == rejected) fail(ErrorKind::data, "'chosen' and 'rejected' are the same");
  const auto both = [&](const Prompt& prompt, const Json& better, const Json& worse) {
    return std::vector<Example>{
        with_side(example_of(object, prompt, better, "chosen", options), Side::chosen),
        with_side(example_of(object, prompt, worse, "rejected", options), Side::rejected)};
  };
  const bool questions = begins_with_question(chosen) && begins_with_question(rejected);
  if (chosen.is_string() && rejected.is_string()) {
    if (has(object, "prompt") || has(object, "messages") || has(object, "conversations") ||
        has(object, "instruction"))
      return both(prompt_in(object), chosen, rejected);
    const auto better = chosen.get<std::string>(), worse = rejected.get<std::string>();
    const std::size_t same = common_text(better, worse);
    return both({better.substr(0, same), {}}, better.substr(same), worse.substr(same));
  }
  if (!questions) return both(prompt_in(object), chosen, rejected);
  const auto same = static_cast<std::ptrdiff_t>(common_messages(chosen, rejected));
  if (same == 0)
    fail(ErrorKind::data, "'chosen' and 'rejected' do not begin with the same question");
  Prompt prompt;
  append_messages(Json(chosen.begin(), chosen.begin() + same), false, prompt.messages);
  if (has(object, "prompt") && object["prompt"].is_string() &&
      std::none_of(prompt.messages.begin(), prompt.messages.end(),
                   [&](const ChatMessage& m) { return object["prompt"] == m.content; }))
    fail(ErrorKind::data,
         "'prompt' is none of the messages with which 'chosen' and 'rejected' begin: which of them is asked?");
  return both(prompt, Json(chosen.begin() + same, chosen.end()), Json(rejected.begin() + same, rejected.end()));
}

/// How good each answer of a list is; the higher the better.
std::vector<double> grades(const Json& object, std::size_t answers) {
  std::vector<double> out;
  for (const auto& [key, sign] : {std::pair<const char*, double>{"ranks", -1}, {"scores", 1}}) {
    if (!has(object, key)) continue;
    const Json& list = object[key];
    if (!out.empty()) fail(ErrorKind::data, "'ranks' and 'scores' both order the answers: keep one");
    if (!list.is_array() || list.size() != answers ||
        !std::all_of(list.begin(), list.end(), [](const Json& grade) { return grade.is_number(); }))
      fail(ErrorKind::data, "'", key, "' is no list of ", answers, " numbers, one for each answer");
    for (const Json& grade : list) out.push_back(sign * grade.get<double>());
  }
  for (std::size_t i = out.size(); i < answers; ++i) out.push_back(-static_cast<double>(i));
  return out;
}

std::vector<Example> ranked(const Json& object, const char* key, const ExampleOptions& options) {
  const Json& answers = object[key];
  if (answers.size() < 2 || answers.size() > most_ranked)
    fail(ErrorKind::data, "'", key, "' has ", counted(std::ssize(answers), "answer"), "; 2 to ", most_ranked,
         " can be ranked");
  const std::vector<double> grade = grades(object, answers.size());
  const Prompt prompt = prompt_in(object);
  std::vector<Example> texts, out;
  for (const Json& answer : answers) texts.push_back(example_of(object, prompt, answer, key, options));
  for (std::size_t better = 0; better < texts.size(); ++better)
    for (std::size_t worse = 0; worse < texts.size(); ++worse)
      if (grade[better] > grade[worse] && answers[better] != answers[worse]) {
        out.push_back(with_side(texts[better], Side::chosen));
        out.push_back(with_side(texts[worse], Side::rejected));
      }
  if (out.empty()) fail(ErrorKind::data, "none of '", key, "' is better than another");
  return out;
}

Side side_of(bool label) {
  return label ? Side::chosen : Side::rejected;
}

/// A conversation whose last answer has the label.
Example judged(const Json& object, const ExampleOptions& options) {
  std::optional<Conversation> of = conversation_in(object);
  bool last = true;
  for (auto message = of->messages.rbegin(); message != of->messages.rend(); ++message) {
    message->learned = message->learned && last;
    last = last && message->role != "assistant";
  }
  return conversation_example(*of, options);
}

}  // namespace

std::vector<Example> preferences_in(const Json& object, const ExampleOptions& options) {
  if (has(object, "chosen") != has(object, "rejected")) {
    if (has(object, "text")) return {};  // a column of another meaning
    fail(ErrorKind::data, "has '", has(object, "chosen") ? "chosen" : "rejected", "' without '",
         has(object, "chosen") ? "rejected" : "chosen",
         "'; answers that are judged alone have 'prompt', 'completion' and 'label' (true or false)");
  }
  if (has(object, "chosen")) {
    if (has(object, "margin"))
      fail(ErrorKind::data, "has 'margin', which no objective here reads: take it out");
    return pair(object, options);
  }
  for (const char* key : {"completions", "responses"})
    if (has(object, key) && object[key].is_array()) return ranked(object, key, options);
  if (!has(object, "label") || !object["label"].is_boolean()) return {};
  const Side side = side_of(object["label"].get<bool>());
  for (const char* key : {"completion", "response"})
    if (has(object, "prompt") && has(object, key))
      return {with_side(example_of(object, prompt_in(object), object[key], key, options), side)};
  if (has(object, "messages") || has(object, "conversations") ||
      (has(object, "instruction") && has(object, "output")))
    return {with_side(judged(object, options), side)};
  return {};
}

}  // namespace sherd::data
