#include "data/text/preference_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/text/conversation_json.h"

namespace sherd::data {
namespace {

using Json = nlohmann::ordered_json;

/// Answers to one prompt from which pairs are made: 32 give 496.
constexpr std::size_t most_ranked = 32;
/// A prompt of so many bytes with which both answers begin is in them a second time.
constexpr std::size_t no_accident = 20;

bool is_answer(const Json& value) {
  return value.is_string() || ((value.is_array() || value.is_object()) && !value.empty());
}

/// The value of the first of these keys that has an answer; null: none has.
const Json* answer_at(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const auto found = object.find(key); found != object.end() && is_answer(*found)) return &*found;
  return nullptr;
}

bool asks(const Json& object) {
  for (const char* key : {"prompt", "messages", "conversations", "instruction", "question", "input"})
    if (has(object, key)) return true;
  return false;
}

/// A prompt, in one of two forms.
struct Prompt {
  std::optional<std::string> text;
  std::vector<ChatMessage> messages;
};

/// A question with what the system says before it, which is a conversation, or by itself.
Prompt question(const Json& object, const std::string& text, bool by_itself) {
  Prompt out;
  if (std::string system = text_at(object, "system"); !system.empty())
    out.messages.push_back({"system", std::move(system)});
  else if (by_itself)
    return {text, {}};
  if (!text.empty()) out.messages.push_back({"user", text});
  return out;
}

Prompt prompt_in(const Json& object) {
  Prompt out;
  if (has(object, "prompt")) {
    const Json& prompt = object["prompt"];
    if (prompt.is_string()) return question(object, prompt.get<std::string>(), true);
    if (!prompt.is_array() && !prompt.is_object())
      fail(ErrorKind::data, "'prompt' is neither a string, a message, nor a list of messages");
    append_messages(prompt.is_array() ? prompt : Json::array({prompt}), false, out.messages);
  } else if (out.messages = asked_in(object); out.messages.empty()) {
    for (const char* key : {"question", "input"})
      if (has(object, key)) return question(object, text_at(object, key), false);
  }
  if (!out.messages.empty() && out.messages.back().role == "assistant")
    fail(ErrorKind::data,
         "what is asked ends with the assistant's words, behind which its answers would stand");
  return out;
}

Example with_side(Example example, Side side) {
  example.side = side;
  return example;
}

/// The text that ends with `answer`: a string, a message, or a list of them.
Example example_of(const Json& object, const Prompt& prompt, const Json& answer,
                   const ExampleOptions& options) {
  if (answer.is_string() && prompt.messages.empty())
    return completion_example(prompt.text.value_or(""), answer.get<std::string>(), options);
  Conversation of{prompt.messages, names_beside(object)};
  if (prompt.text && !prompt.text->empty()) of.messages.push_back({"user", *prompt.text, false});
  if (answer.is_string())
    of.messages.push_back({"assistant", answer.get<std::string>()});
  else if (answer.is_array())
    append_messages(answer, true, of.messages);
  else
    of.messages.push_back(message_in(answer, true));
  return conversation_example(of, options);
}

/// The length of the beginning that two texts share, without a space at its end, as TRL's extract_prompt()
/// finds it; each text keeps a byte at least, and no character is cut.
std::size_t common_text(const std::string& a, const std::string& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t same = 0;
  while (same < most && a[same] == b[same]) ++same;
  if (same == most && most > 0) --same;
  while (same > 0 && (static_cast<unsigned char>(a[same]) & 0xC0) == 0x80) --same;
  if (same > 0 && a[same - 1] == ' ') --same;
  return same;
}

/// Whether two messages say the same, in whatever order and form.
bool say_the_same(const Json& a, const Json& b) {
  const ChatMessage one = message_in(a, true), other = message_in(b, true);
  const auto beside = [](const Json& message) {
    nlohmann::json out = message;  // ordered by its keys
    for (const char* key : {"content", "value"}) out.erase(key);
    return out;
  };
  return one.role == other.role && one.content == other.content && beside(a) == beside(b);
}

/// Messages that two lists begin with, but for the last of each.
std::size_t common_messages(const Json& a, const Json& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t same = 0;
  while (same + 1 < most && say_the_same(a[same], b[same])) ++same;
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

std::string trimmed(const std::string& text) {
  const char* spaces = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(spaces);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(spaces) + 1 - begin);
}

std::vector<Example> both(const Json& object, const Prompt& prompt, const Json& chosen, const Json& rejected,
                          const ExampleOptions& options) {
  return {with_side(example_of(object, prompt, chosen, options), Side::chosen),
          with_side(example_of(object, prompt, rejected, options), Side::rejected)};
}

/// Two texts, with a prompt or with what they begin with.
std::vector<Example> texts(const Json& object, const std::string& chosen, const std::string& rejected,
                           const ExampleOptions& options) {
  if (!asks(object)) {
    const std::size_t same = common_text(chosen, rejected);
    return both(object, {chosen.substr(0, same), {}}, chosen.substr(same), rejected.substr(same), options);
  }
  const Prompt prompt = prompt_in(object);
  if (prompt.text && prompt.text->size() >= no_accident && chosen.starts_with(*prompt.text) &&
      rejected.starts_with(*prompt.text))
    fail(ErrorKind::data,
         "'chosen' and 'rejected' begin with 'prompt', which would stand there twice: take it "
         "out of them, or leave 'prompt' out");
  return both(object, prompt, chosen, rejected, options);
}

/// Two lists of messages, which begin with the question.
std::vector<Example> conversations(const Json& object, const Json& chosen, const Json& rejected,
                                   const ExampleOptions& options) {
  const auto same = static_cast<std::ptrdiff_t>(common_messages(chosen, rejected));
  if (same == 0) fail(ErrorKind::data, "'chosen' and 'rejected' do not begin with the same question");
  const Json question(chosen.begin(), chosen.begin() + same);
  const Json* prompt = has(object, "prompt") ? &object["prompt"] : nullptr;
  if (prompt && prompt->is_array()) {
    const bool within = prompt->size() <= question.size() &&
                        std::equal(prompt->begin(), prompt->end(), question.begin(), say_the_same);
    if (!within) return both(object, prompt_in(object), chosen, rejected, options);
  }
  Prompt asked;
  append_messages(question, false, asked.messages);
  if (prompt && prompt->is_string() && !trimmed(prompt->get<std::string>()).empty() &&
      std::none_of(asked.messages.begin(), asked.messages.end(), [&](const ChatMessage& m) {
        return trimmed(prompt->get<std::string>()) == trimmed(m.content);
      }))
    fail(
        ErrorKind::data,
        "'prompt' is none of the messages with which 'chosen' and 'rejected' begin: which of them is asked?");
  return both(object, asked, Json(chosen.begin() + same, chosen.end()),
              Json(rejected.begin() + same, rejected.end()), options);
}

std::vector<Example> pair(const Json& object, const Json& chosen, const Json& rejected,
                          const ExampleOptions& options) {
  if (has(object, "margin"))
    fail(ErrorKind::data, "has 'margin', which no objective here reads: take it out");
  if (chosen == rejected)
    fail(ErrorKind::data, "'chosen' and 'rejected' are the same (--on-error skip leaves such lines out)");
  if (chosen.is_string() != rejected.is_string())
    fail(ErrorKind::data, "of 'chosen' and 'rejected' one is a text, and the other messages");
  if (chosen.is_string())
    return texts(object, chosen.get<std::string>(), rejected.get<std::string>(), options);
  const bool questions = begins_with_question(chosen);
  if (questions != begins_with_question(rejected))
    fail(ErrorKind::data, "of 'chosen' and 'rejected' one begins with a question, and the other does not");
  return questions ? conversations(object, chosen, rejected, options)
                   : both(object, prompt_in(object), chosen, rejected, options);
}

/// An answer of a list, and how good it is, where it says so itself by the key of that name.
struct Ranked {
  Json answer;
  std::optional<double> grade;
  std::string graded_by;
};

/// An answer as it is, or in an object with its rank or score (UltraFeedback's).
Ranked ranked_of(const Json& item, const char* key, std::size_t index) {
  if (!item.is_object() || item.contains("role") || item.contains("from")) {
    if (!is_answer(item)) fail(ErrorKind::data, "item ", index, " of '", key, "' is no answer");
    return {item, {}, {}};
  }
  const Json* answer = answer_at(item, {"response", "completion", "text"});
  if (!answer) {
    const auto quoted = [](const auto& entry) { return cat("'", excerpt(entry.key()), "'"); };
    fail(ErrorKind::data, "item ", index, " of '", key,
         "' is neither a text, a message nor an object with 'response' and 'score' or 'rank' (its keys: ",
         joined_text(item.items(), ", ", quoted), ")");
  }
  Ranked out{*answer, {}, {}};
  for (const auto& [grade, sign] :
       {std::pair<const char*, double>{"rank", -1}, {"overall_score", 1}, {"score", 1}, {"reward", 1}}) {
    if (!has(item, grade)) continue;
    if (!item[grade].is_number())
      fail(ErrorKind::data, "'", grade, "' of item ", index, " of '", key, "' is no number");
    const bool of_both = out.graded_by == "overall_score" && std::string_view(grade) == "score";
    if (out.grade && !of_both)  // UltraFeedback has both
      fail(ErrorKind::data, "item ", index, " of '", key, "' has '", out.graded_by, "' and '", grade,
           "', which both order the answers: keep one");
    if (!out.grade) out = {std::move(out.answer), sign * item[grade].get<double>(), grade};
  }
  return out;
}

/// How good each answer of a list is; the higher the better.
std::vector<double> grades(const Json& object, const std::vector<Ranked>& answers) {
  std::vector<double> out;
  for (const auto& [key, sign] : {std::pair<const char*, double>{"ranks", -1}, {"scores", 1}}) {
    if (!has(object, key)) continue;
    const Json& list = object[key];
    if (!out.empty()) fail(ErrorKind::data, "'ranks' and 'scores' both order the answers: keep one");
    if (!list.is_array() || list.size() != answers.size() ||
        !std::all_of(list.begin(), list.end(), [](const Json& grade) { return grade.is_number(); }))
      fail(ErrorKind::data, "'", key, "' is no list of ", answers.size(), " numbers, one for each answer");
    for (const Json& grade : list) out.push_back(sign * grade.get<double>());
  }
  const bool own = out.empty() && std::any_of(answers.begin(), answers.end(),
                                              [](const Ranked& each) { return each.grade.has_value(); });
  for (std::size_t i = out.size(); i < answers.size(); ++i) {
    if (own && !answers[i].grade)
      fail(ErrorKind::data, "some answers have a score, and answer ", i, " has none");
    if (own && answers[i].graded_by != answers[0].graded_by)
      fail(ErrorKind::data, "some answers have '", answers[0].graded_by, "', and answer ", i, " has '",
           answers[i].graded_by, "': give all the same");
    out.push_back(own ? *answers[i].grade : -static_cast<double>(i));
  }
  return out;
}

std::vector<Example> ranked(const Json& object, const char* key, const ExampleOptions& options) {
  const Json& list = object[key];
  if (has(object, "labels"))
    fail(ErrorKind::data, "has 'labels' beside '", key,
         "', as steps of one answer have: these are not learned by their labels here");
  if (list.size() < 2 || list.size() > most_ranked)
    fail(ErrorKind::data, "'", key, "' has ", counted(std::ssize(list), "answer"), "; 2 to ", most_ranked,
         " can be ranked");
  std::vector<Ranked> answers;
  for (const Json& item : list) answers.push_back(ranked_of(item, key, answers.size()));
  const bool are_texts = answers[0].answer.is_string();
  for (const auto& [answer, own, graded_by] : answers) {
    if (answer.is_string() != are_texts)
      fail(ErrorKind::data, "some of '", key, "' are texts, and others messages");
    if (begins_with_question(answer))
      fail(ErrorKind::data, "an answer in '", key, "' begins with a question: give the answers alone");
  }
  const std::vector<double> grade = grades(object, answers);
  const Prompt prompt = prompt_in(object);
  std::vector<Example> texts, out;
  for (const Ranked& each : answers) texts.push_back(example_of(object, prompt, each.answer, options));
  for (std::size_t better = 0; better < texts.size(); ++better)
    for (std::size_t worse = 0; worse < texts.size(); ++worse)
      if (grade[better] > grade[worse] && answers[better].answer != answers[worse].answer) {
        out.push_back(with_side(texts[better], Side::chosen));
        out.push_back(with_side(texts[worse], Side::rejected));
      }
  if (out.empty()) fail(ErrorKind::data, "none of '", key, "' is better than another");
  return out;
}

/// Whether an answer is desirable: true or false, 1 or 0, or these as text.
Side judgement(const Json& label, const char* key) {
  const std::string text = label.is_string() ? label.get<std::string>() : label.dump();
  if (text == "true" || text == "True" || text == "1") return Side::chosen;
  if (text == "false" || text == "False" || text == "0") return Side::rejected;
  fail(ErrorKind::data, "'", key, "' is ", excerpt(label.dump()),
       ", and says of an answer whether it is desirable: true or false, 1 or 0 (take it out where it means "
       "another thing)");
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

/// OpenAI's form as the others have it.
Json of_openai(const Json& object) {
  Json out{{"chosen", object["preferred_output"]}, {"rejected", object["non_preferred_output"]}};
  if (const auto input = object.find("input"); input != object.end() && input->is_object())
    for (const auto& [key, value] : input->items()) out[key] = value;
  return out;
}

/// A conversation's own last answer is the chosen one, and another stands beside it.
std::vector<Example> with_rejected_response(const Json& object, const ExampleOptions& options) {
  Json asked = object;
  Json& messages = asked["messages"];
  if (!messages.is_array() || messages.size() < 2)
    fail(ErrorKind::data, "'rejected_response' goes with 'messages' that end with the chosen answer");
  const Json chosen = messages.back();
  messages.erase(messages.size() - 1);
  Json rejected = object["rejected_response"];
  if (rejected.is_string()) rejected = Json{{"role", "assistant"}, {"content", rejected}};
  return pair(asked, chosen, rejected, options);
}

std::vector<Example> compared(const Json& object, const ExampleOptions& options) {
  if (answer_at(object, {"preferred_output"}) && answer_at(object, {"non_preferred_output"})) {
    const Json same = of_openai(object);
    return pair(same, same["chosen"], same["rejected"], options);
  }
  const Json *chosen = answer_at(object, {"chosen", "chosen_response"}),
             *rejected = answer_at(object, {"rejected", "rejected_response"});
  if (!chosen && rejected && object.contains("rejected_response") && has(object, "messages"))
    return with_rejected_response(object, options);
  // Columns without a value are those of a table with lines of other kinds.
  const bool empty = chosen && rejected && *chosen == "" && *rejected == "" && has(object, "text");
  if ((!chosen && !rejected) || empty) return {};
  if (chosen && rejected) return pair(object, *chosen, *rejected, options);
  if (has(object, "text") || has(object, "messages") || has(object, "conversations"))
    return {};  // a column of another meaning
  fail(ErrorKind::data, "has '", chosen ? "chosen" : "rejected", "' without '",
       chosen ? "rejected" : "chosen",
       "'; answers that are judged alone have 'prompt', 'completion' and 'label' (true or false)");
}

}  // namespace

template <class Object>
std::vector<Example> preferences_in(const Object& object, const ExampleOptions& options) {
  if (std::vector<Example> pairs = compared(object, options); !pairs.empty()) return pairs;
  for (const char* key : {"completions", "responses"})
    if (has(object, key) && object[key].is_array() && !object[key].empty() && asks(object))
      return ranked(object, key, options);
  for (const char* key : {"label", "kto_tag"}) {
    if (!has(object, key)) continue;
    const char* answer = has(object, "completion") ? "completion" : "response";
    const bool asked = has(object, "prompt") && has(object, answer);
    const bool conversation = has(object, "messages") || has(object, "conversations") ||
                              (has(object, "instruction") && has(object, "output"));
    if (!asked && !conversation) continue;  // a class of a text
    const Side side = judgement(object[key], key);
    if (!asked) return {with_side(judged(object, options), side)};
    if (!is_answer(object[answer]))
      fail(ErrorKind::data, "'", answer, "' is neither a string, a message, nor a list of messages");
    return {with_side(example_of(object, prompt_in(object), object[answer], options), side)};
  }
  return {};
}

template std::vector<Example> preferences_in(const Json&, const ExampleOptions&);

}  // namespace sherd::data
