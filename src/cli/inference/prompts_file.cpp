#include "cli/inference/prompts_file.h"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/text/example.h"
#include "data/text/text_source.h"

namespace sherd::cli {
namespace {

/// The words of a prompt.
std::vector<std::string> words_of(const nlohmann::json& list, const std::string& where) {
  const bool words = list.is_array() && !list.empty() &&
                     std::all_of(list.begin(), list.end(), [](const auto& word) { return word.is_string(); });
  if (words) return list.get<std::vector<std::string>>();
  fail(ErrorKind::data, where, ": \"tokens\" is no list of words, one at least: '", excerpt(list.dump()),
       "'; take the line out, or name its words");
}

Prompt prompt_of(const std::string& line, const std::filesystem::path& path, std::size_t number, bool texts) {
  const std::string where = cat(path.string(), ":", number);
  const auto object = nlohmann::json::parse(line, nullptr, false);
  if (object.is_object() && (object.contains("messages") || object.contains("conversations"))) {
    Prompt prompt{"", data::read_conversation(line, path, static_cast<std::int64_t>(number)), where};
    if (prompt.conversation.messages.empty())
      fail(ErrorKind::data, where, " is a conversation without messages");
    return prompt;
  }
  auto found = object.is_object() ? object.find("prompt") : object.end();
  if (texts && object.is_object() && found == object.end()) found = object.find("text");
  const bool has_text = object.is_object() && found != object.end() && found->is_string();
  // Beside a text "tokens" is something else.
  const bool has_words = texts && !has_text && object.is_object() && object.contains("tokens");
  if (!has_text && !has_words)
    fail(ErrorKind::data, where, " is no JSON object with a text \"prompt\" or a list \"messages\": '",
         excerpt(line), "'");
  Prompt prompt{has_text ? found->get<std::string>() : "", {}, where};
  if (has_words) prompt.words = words_of(object["tokens"], where);
  if (const auto pair = object.find("text_pair"); texts && pair != object.end() && !pair->is_null()) {
    if (!pair->is_string()) fail(ErrorKind::data, where, ": \"text_pair\" is no text: '", excerpt(line), "'");
    prompt.pair = pair->get<std::string>();
  }
  return prompt;
}

nlohmann::ordered_json described(const Prompt& prompt) {
  const std::vector<data::ChatMessage>& messages = prompt.conversation.messages;
  if (messages.empty() && prompt.pair) return {{"prompt", prompt.text}, {"text_pair", *prompt.pair}};
  if (prompt.text.empty() && !prompt.words.empty()) return nlohmann::ordered_json::object();
  if (messages.empty()) return {{"prompt", prompt.text}};
  auto list = nlohmann::ordered_json::array();
  for (const data::ChatMessage& message : messages)
    list.push_back(nlohmann::ordered_json::parse(data::value_of(message).json({})));
  return {{"messages", list}};
}

nlohmann::ordered_json list_of(const std::vector<WordLabel>& words) {
  auto out = nlohmann::ordered_json::array();
  for (const WordLabel& each : words) {
    nlohmann::ordered_json word{{"word", each.word}, {"label", nullptr}};
    if (!each.label.empty()) word["label"] = each.label, word["probability"] = each.probability;
    out.push_back(std::move(word));
  }
  return out;
}

}  // namespace

std::vector<Prompt> read_prompts(const std::filesystem::path& path, bool texts) {
  data::TextSource source(data::find_inputs({path.string()}), data::DocumentRule::line);
  std::vector<Prompt> out;
  std::string line;
  for (data::TextPiece piece; source.next(piece);) {
    line += piece.text;
    if (!piece.last) continue;  // of a long line
    const std::filesystem::path& file = source.files()[piece.file].path;
    if (line.find_first_not_of(" \t") != std::string::npos)
      out.push_back(piece.json ? prompt_of(line, file, static_cast<std::size_t>(piece.line), texts)
                               : Prompt{line, {}, cat(file.string(), ":", piece.line)});
    line.clear();
  }
  if (out.empty()) fail(ErrorKind::data, path.string(), " holds no prompts: each is a line");
  return out;
}

CompletionsFile::CompletionsFile(const std::filesystem::path& path, const std::vector<Prompt>& prompts)
    : path_(path), prompts_(prompts), stdout_(std::cout) {
  if (path_.empty()) return;
  file_.open(path_, std::ios::binary | std::ios::trunc);
  if (!file_) fail(ErrorKind::io, "cannot write ", path_.string(), ": is its folder there and writable?");
}

void CompletionsFile::add(std::size_t prompt, Completion completion) {
  waiting_.emplace(prompt, std::move(completion));
  for (auto at = waiting_.find(next_); at != waiting_.end(); at = waiting_.find(++next_)) {
    nlohmann::ordered_json line = described(prompts_[next_]);
    const Completion& done = at->second;
    const bool completes = done.embedding.empty() && done.labels.empty() && !done.words;
    if (completes) line["completion"] = done.text;
    line["tokens"] = done.tokens;
    if (completes) line["finish"] = done.finish;
    if (!done.embedding.empty()) line["embedding"] = done.embedding;
    if (!done.labels.empty()) {
      const auto less = [](const auto& a, const auto& b) { return a.second < b.second; };
      line["label"] = std::max_element(done.labels.begin(), done.labels.end(), less)->first;
      for (const auto& [label, probability] : done.labels) line["probabilities"][label] = probability;
    }
    if (done.words) line["words"] = list_of(*done.words);
    out() << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n' << std::flush;
    if (!out())
      fail(ErrorKind::io, "writing ", path_.empty() ? "stdout" : path_.string(),
           " failed: is the disk full?");
    waiting_.erase(at);
  }
}

}  // namespace sherd::cli
