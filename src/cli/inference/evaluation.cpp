#include "cli/inference/evaluation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "cli/inference/inference.h"
#include "data/hugging_face/steps/unicode.h"
#include "data/packing/packing.h"
#include "data/text/input_stream.h"

namespace sherd::cli {
namespace {

using Json = nlohmann::json;

constexpr const char* spaces = " \t\n\r\f\v";  // of JSON lines

std::string text_at(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end()) return {};
  if (!found->is_string())
    fail(ErrorKind::data, where, ": \"", key, "\" is no text: ", excerpt(found->dump()));
  return found->get<std::string>();
}

std::size_t answer_of(const Json& object, const std::vector<std::string>& choices, const std::string& where) {
  const auto found = object.find("answer");
  if (found == object.end())
    fail(ErrorKind::data, where,
         " has \"choices\" and no \"answer\": the index, or the text, of the right one");
  if (found->is_number_integer()) {
    const auto index = found->get<std::int64_t>();
    if (index >= 0 && index < std::ssize(choices)) return static_cast<std::size_t>(index);
    fail(ErrorKind::data, where, ": \"answer\" is ", index, ", and there are choices 0 to ",
         choices.size() - 1);
  }
  const auto at = found->is_string() ? std::find(choices.begin(), choices.end(), found->get<std::string>())
                                     : choices.end();
  if (at == choices.end())
    fail(ErrorKind::data, where, ": \"answer\" is none of the choices: ", excerpt(found->dump()));
  return static_cast<std::size_t>(at - choices.begin());
}

std::vector<std::string> choices_of(const Json& choices, const std::string& where) {
  const auto is_text = [](const Json& choice) {
    return choice.is_string() && !choice.get_ref<const std::string&>().empty();
  };
  if (!choices.is_array() || choices.size() < 2 || !std::all_of(choices.begin(), choices.end(), is_text))
    fail(ErrorKind::data, where, ": \"choices\" are two texts or more, none of them empty, not ",
         excerpt(choices.dump()));
  return choices.get<std::vector<std::string>>();
}

/// A context that is called something else, also as public tasks call theirs, would be left out of what is
/// scored.
void require_no_other_context(const Json& object, const std::string& where) {
  constexpr std::array others{"prompt",   "question", "query", "instruction", "input",
                              "sentence", "passage",  "ctx",   "goal"};
  const auto is_context = [&](const std::string& key) {
    return std::find(others.begin(), others.end(), key) != others.end() ||
           (key != "context" && !nearest(key, std::array<std::string, 1>{"context"}).empty());
  };
  for (const auto& [key, value] : object.items())
    if (is_context(key))
      fail(ErrorKind::data, where, " has \"", excerpt(key),
           "\" and no \"context\": what a choice or a completion ", "is read behind is the \"context\"");
}

TaskExample example_of(const Json& object, const std::string& where) {
  TaskExample out;
  const int kinds = object.contains("choices") + object.contains("completion") + object.contains("text");
  if (kinds != 1)
    fail(ErrorKind::data, where, kinds == 0 ? " has none" : " has more than one",
         " of \"choices\", \"completion\" and \"text\", of which there must be one");
  out.task = text_at(object, "task", where);
  out.context = text_at(object, "context", where);
  if (out.context.empty() && !object.contains("text")) require_no_other_context(object, where);
  if (object.contains("choices")) {
    out.continuations = choices_of(object["choices"], where);
    out.answer = answer_of(object, out.continuations, where);
    return out;
  }
  out.is_text = object.contains("text");
  if (out.is_text && object.contains("context"))
    fail(ErrorKind::data, where, ": a \"text\" is scored whole; with a \"context\" it is a \"completion\"");
  const char* key = out.is_text ? "text" : "completion";
  out.continuations.push_back(text_at(object, key, where));
  if (out.continuations[0].empty()) fail(ErrorKind::data, where, ": \"", key, "\" is empty");
  return out;
}

std::string kind_of(const TaskExample& example) {
  return example.answer ? "choice" : example.is_text ? "text" : "completion";
}

/// Characters without white space in front, which is there to part a choice from what it follows.
double length_of(const std::string& choice) {
  const std::size_t first = std::min(choice.find_first_not_of(spaces), choice.size());
  const auto starts = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return static_cast<double>(std::max<std::ptrdiff_t>(
      1, std::count_if(choice.begin() + static_cast<std::ptrdiff_t>(first), choice.end(), starts)));
}

/// Runs of white space, and one: what the common evaluation harness divides by.
std::int64_t words_of(const std::string& text) {
  std::int64_t words = 1;
  bool space = false;
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(utf8_length(rest))) {
    const bool now = data::is_python_space(data::first_character(rest));
    words += now && !space;
    space = now;
  }
  return words;
}

/// A line's object.
Json object_of(const std::string& line, const std::string& where) {
  try {
    Json object = Json::parse(line);
    if (object.is_object()) return object;
  } catch (const Json::exception& error) {
    fail(ErrorKind::data, where, " is no JSON: ", excerpt(error.what(), 300), "; it is '", excerpt(line),
         "'");
  }
  fail(ErrorKind::data, where, " is no JSON object: '", excerpt(line), "'");
}

/// A file's text, unpacked where it is gzip or zstd.
std::string unpacked(const std::filesystem::path& path) {
  data::InputStream in(path);
  std::string text, block(std::size_t{1} << 16, '\0');
  while (const std::size_t got = in.read(block.data(), block.size())) text.append(block, 0, got);
  return text;
}

}  // namespace

std::vector<TaskExample> read_examples(const std::filesystem::path& path) {
  std::istringstream lines(unpacked(path));
  std::filesystem::path name = path.stem();  // of x.jsonl, and of x.jsonl.gz
  if (name.extension() == ".jsonl") name = name.stem();
  std::vector<TaskExample> out;
  std::map<std::string, std::string> kinds;  // of tasks, whose metrics mean one thing each
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(spaces) == std::string::npos) continue;
    const std::string where = cat(path.string(), ":", number);
    const Json object = object_of(line, where);
    out.push_back(example_of(object, where));
    out.back().line = number;
    if (out.back().task.empty()) out.back().task = name.string();
    const auto [kind, first] = kinds.try_emplace(out.back().task, kind_of(out.back()));
    if (!first && kind->second != kind_of(out.back()))
      fail(ErrorKind::data, where, " has a ", kind_of(out.back()), ", and task '", excerpt(out.back().task),
           "' lines with a ", kind->second, " before: tell them apart by \"task\"");
  }
  if (out.empty()) fail(ErrorKind::data, path.string(), " holds no examples: each is a line of JSON");
  return out;
}

models::ScoreRequest answer_to(const data::Tokenizer& tokenizer, const std::string& context,
                               const std::string& continuation, const config::Model& model,
                               const std::string& where) {
  std::vector<std::int32_t> source = prompt_of(tokenizer, context), target = tokenizer.encode(continuation);
  for (std::vector<std::int32_t>* text : {&source, &target})
    data::end_text(*text, tokenizer.end_of_document());
  for (const auto& [what, text, most] : {std::tuple("context", &source, model.encoder.seq_length),
                                         {"continuation", &target, model.target_length()}})
    if (std::ssize(*text) > most)
      fail(ErrorKind::data, where, ": a ", what, " of ", text->size(), " tokens is longer than the model's ",
           most, ", so shorten it, or take the line out", ": '",
           excerpt(what == std::string("context") ? context : continuation), "'");
  models::ScoreRequest out{std::move(source), 0, {}};
  out.first = std::ssize(out.tokens);
  out.tokens.insert(out.tokens.end(), target.begin(), target.end());
  return out;
}

std::vector<models::ScoreRequest> windows_of(const data::Tokenizer& tokenizer, const std::string& context,
                                             const std::string& continuation, std::int64_t max_seq) {
  const std::string before(data::without_python_space_behind(context));
  std::vector<std::int32_t> tokens = prompt_of(tokenizer, before), whole;
  auto start = std::ssize(tokens);
  if (before.empty() || tokenizer.encode(before).empty()) {
    tokenizer.encode(context + continuation, whole);
    // The token that begins texts stands in front once, also where the continuation spells it out.
    const bool spelled = context.empty() && whole.size() > 1 && whole.front() == tokens.front();
    tokens.insert(tokens.end(), whole.begin() + spelled, whole.end());
  } else {
    whole = prompt_of(tokenizer, context + continuation);
    if (start < std::ssize(whole))
      tokens.insert(tokens.end(), whole.begin() + start, whole.end());
    else  // the two became fewer tokens, of which the last has them both
      tokens = std::move(whole), start = std::ssize(tokens) - 1;
  }
  if (start < 1 || start >= std::ssize(tokens))
    fail(ErrorKind::data, "'", excerpt(context + continuation), "' is one token: there is nothing to score");
  return models::score_windows(tokens, start, max_seq);
}

std::vector<models::ScoreRequest> text_windows(const data::Tokenizer& tokenizer, const std::string& text,
                                               std::int64_t max_seq) {
  std::vector<std::int32_t> tokens = prompt_of(tokenizer, "");
  const std::vector<std::int32_t> all =
      tokenizer.begin_of_document() ? prompt_of(tokenizer, text) : tokenizer.encode(text);
  tokens.insert(tokens.end(), all.begin(), all.end());
  if (tokens.size() < 2)
    fail(ErrorKind::data, "nothing is left of '", excerpt(text), "' as tokens: there is nothing to score");
  return models::score_windows(tokens, 1, max_seq);
}

Verdict judge(const TaskExample& example, std::vector<models::Score> scores) {
  Verdict out{std::move(scores), 0, 0};
  const auto per_character = [&](std::size_t i) {
    return out.scores[i].log_likelihood / length_of(example.continuations[i]);
  };
  for (std::size_t i = 1; i < out.scores.size(); ++i) {
    if (out.scores[i].log_likelihood > out.scores[out.choice].log_likelihood) out.choice = i;
    if (per_character(i) > per_character(out.choice_by_length)) out.choice_by_length = i;
  }
  return out;
}

void TaskMetrics::add(const TaskExample& example, const Verdict& verdict) {
  ++examples_;
  if (example.answer) {
    ++choices_;
    right_ += verdict.choice == *example.answer;
    right_by_length_ += verdict.choice_by_length == *example.answer;
    add_tokens(verdict.scores[*example.answer]);
    return;
  }
  add_tokens(verdict.scores[0]);
  if (example.is_text) {
    words_ += words_of(example.continuations[0]);
    bytes_ += std::ssize(example.continuations[0]);
  } else {
    ++completions_;
    greedy_ += verdict.scores[0].greedy;
  }
}

std::vector<Metric> TaskMetrics::metrics() const {
  std::vector<Metric> out;
  const auto share = [&](const char* name, std::int64_t right, std::int64_t of) {
    const double mean = static_cast<double>(right) / static_cast<double>(of);
    Metric metric{name, mean, {}};
    if (of > 1) metric.error = std::sqrt(mean * (1 - mean) / static_cast<double>(of - 1));
    out.push_back(metric);
  };
  const auto per = [&](std::int64_t n) { return -likelihood_ / static_cast<double>(n); };
  if (choices_ > 0) share("acc", right_, choices_), share("acc_norm", right_by_length_, choices_);
  if (completions_ > 0) {
    share("acc", greedy_, completions_);
    out.push_back({"perplexity", std::exp(per(completions_)), {}});
  }
  if (bytes_ > 0) {
    out.push_back({"word_perplexity", std::exp(per(words_)), {}});
    out.push_back({"byte_perplexity", std::exp(per(bytes_)), {}});
    out.push_back({"bits_per_byte", per(bytes_) / std::log(2.0), {}});
  }
  if (choices_ == 0 && tokens_ > 0) {
    out.push_back({"token_perplexity", std::exp(per(tokens_)), {}});
    out.push_back({"loss", per(tokens_), {}});
  }
  return out;
}

}  // namespace sherd::cli
