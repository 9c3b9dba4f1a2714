#include "data/text/labelled_example.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/packing/packing.h"
#include "data/text/json_line.h"

namespace sherd::data {
namespace {

using nlohmann::json;

std::string or_else(const std::string& given, const char* otherwise) {
  return given.empty() ? otherwise : given;
}

/// The value that a line needs; `what` and `option` say how to name its key.
const json& needed(const json& object, const std::string& field, const char* what, const char* option) {
  const auto found = object.find(field);
  if (found == object.end())
    fail(ErrorKind::data, "has no '", excerpt(field), "' (keys: ", keys_of(object),
         "); name the field that holds the ", what, ", by ", option);
  return *found;
}

/// A string, or nothing where the key is not there, or null.
std::optional<std::string> string_in(const json& object, const std::string& field) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return std::nullopt;
  if (!found->is_string()) fail(ErrorKind::data, "'", excerpt(field), "' is no string");
  return found->get<std::string>();
}

/// The number of a class by its name or number.
std::int32_t class_of(const json& label, const std::vector<std::string>& labels) {
  for (std::size_t i = 0; i < labels.size(); ++i)
    if (label.is_string() ? label == labels[i] : label.is_number() && label == i)
      return static_cast<std::int32_t>(i);
  fail(ErrorKind::data, "has the label ", excerpt(label.dump()),
       ", which is none of --labels, nor a number below ", labels.size());
}

json object_in(const std::string& line) {
  json object = json::parse(line);
  if (!object.is_object()) fail(ErrorKind::data, "is no JSON object");
  return object;
}

}  // namespace

std::optional<bool> has_words(const std::string& line, const LabelledOptions& options) {
  const json object = json::parse(line, nullptr, false);
  if (!object.is_object()) return {};
  // Beside a text "tokens" is something else.
  if (options.text_field.empty() && object.contains("text") && object["text"].is_string()) return false;
  const auto found = object.find(or_else(options.text_field, "tokens"));
  return found != object.end() && found->is_array();
}

LabelledExample read_labelled(const std::string& line, const LabelledOptions& options,
                              const std::filesystem::path& file, std::int64_t line_number) {
  return at_line(file, line_number, [&] {
    const json object = object_in(line);
    const std::string field = or_else(options.text_field, "text");
    const std::optional<std::string> text = string_in(object, field);
    if (!text)
      fail(ErrorKind::data, "has no string '", excerpt(field), "' (keys: ", keys_of(object),
           "); name the field that holds the text, by --json-field");
    const json& label = needed(object, or_else(options.label_field, "label"), "label", "--label-field");
    return LabelledExample{*text, string_in(object, options.pair_field), class_of(label, options.labels)};
  });
}

LabelledWords read_labelled_words(const std::string& line, const LabelledOptions& options,
                                  const std::filesystem::path& file, std::int64_t line_number) {
  return at_line(file, line_number, [&] {
    const json object = object_in(line);
    const std::string field = or_else(options.text_field, "tokens"),
                      label_field = or_else(options.label_field, "labels");
    const json &words = needed(object, field, "words", "--json-field"),
               &labels = needed(object, label_field, "labels", "--label-field");
    if (!words.is_array() || !labels.is_array())
      fail(ErrorKind::data, "'", excerpt(words.is_array() ? label_field : field),
           "' is no list, and the first line has a list of words with a label of each: give all lines "
           "both, or prepare these apart");
    if (words.size() != labels.size())
      fail(ErrorKind::data, "'", excerpt(field), "' has ", counted(std::ssize(words), "word"), " and '",
           excerpt(label_field), "' ", counted(std::ssize(labels), "label"), ": give one of each word");
    if (string_in(object, options.pair_field))
      fail(ErrorKind::data, "has '", excerpt(options.pair_field),
           "' beside its words, which are one text: take it out");
    LabelledWords out;
    for (const json& word : words) {
      if (!word.is_string())
        fail(ErrorKind::data, "'", excerpt(field), "' has ", excerpt(word.dump()), ", which is no string");
      out.words.push_back(word.get<std::string>());
    }
    for (const json& label : labels)
      out.labels.push_back(label.is_null() || label == no_label ? -1 : class_of(label, options.labels));
    return out;
  });
}

std::vector<std::int32_t> encode_parts(const Tokenizer& tokenizer, const std::string& text,
                                       const std::optional<std::string>& pair) {
  std::vector<std::int32_t> ids;
  if (const auto begin = tokenizer.begin_of_document()) ids.push_back(*begin);
  tokenizer.encode(text, {.special_tokens = false}, ids);
  ids.push_back(tokenizer.end_of_document());
  if (!pair) return ids;
  tokenizer.encode(*pair, {.behind = EncodeOptions::Behind::token, .special_tokens = false}, ids);
  ids.push_back(tokenizer.end_of_document());
  return ids;
}

EncodedWords encode_words(const Tokenizer& tokenizer, std::span<const std::string> words) {
  EncodedWords out;
  if (const auto begin = tokenizer.begin_of_document()) out.ids.push_back(*begin);
  for (const std::string& word : words) {
    const std::int64_t first = std::ssize(out.ids);
    tokenizer.encode(word, {.special_tokens = false}, out.ids);
    out.first.push_back(std::ssize(out.ids) > first ? first : -1);
  }
  out.ids.push_back(tokenizer.end_of_document());
  return out;
}

void cut_words(EncodedWords& words, std::int64_t most, std::int32_t end) {
  if (std::ssize(words.ids) <= most) return;
  cut_text(words.ids, most, end);
  for (std::int64_t& first : words.first)
    if (first >= most - 1) first = -1;
}

std::vector<std::string> words_in(const std::string& text) {
  constexpr const char* space = " \t\n\v\f\r";
  std::vector<std::string> out;
  for (std::size_t at = text.find_first_not_of(space); at != std::string::npos;
       at = text.find_first_not_of(space, at)) {
    const std::size_t end = std::min(text.find_first_of(space, at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

}  // namespace sherd::data
