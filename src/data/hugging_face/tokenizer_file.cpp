#include "data/hugging_face/tokenizer_file.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/hugging_face/json_fields.h"
#include "data/hugging_face/model_of_file.h"
#include "data/hugging_face/steps_of_file.h"

namespace sherd::data {
namespace {

using nlohmann::json;
using Fields = JsonFields<json>;

/// The one id of a token in a TemplateProcessing's own table.
std::int64_t id_of_special(const Fields& step, const std::string& token) {
  const json& table = step.value("special_tokens");
  if (!table.is_object() || !table.contains(token))
    fail(ErrorKind::data, step.where(), ".special_tokens does not have '", excerpt(token), "'");
  const Fields fields(table[token], step.where() + ".special_tokens", {"id", "ids", "tokens"});
  const json& ids = fields.list("ids");
  if (ids.size() != 1 || !ids.front().is_number_integer())
    fail(ErrorKind::data, step.where(), " puts ", ids.size(), " tokens in front of a text for '",
         excerpt(token), "'; one is supported");
  return ids.front().get<std::int64_t>();
}

/// A token at an end of a text, and the id that the step itself gives it; an empty one: nothing.
struct EndToken {
  std::string token;
  std::int64_t id = 0;
};
struct EndTokens {
  EndToken begin, end;
};

/// [CLS] and [SEP], as pairs of a token and its id.
EndTokens bert_ends(const Fields& step) {
  const auto token = [&](const char* key) {
    const json& pair = step.list(key);
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_number_integer())
      fail(ErrorKind::data, step.where(), ".", key, " is no token and its id");
    return EndToken{pair[0].get<std::string>(), pair[1].get<std::int64_t>()};
  };
  return {token("cls"), token("sep")};
}

EndTokens ends_of(const json& step, const std::string& type, const std::string& where) {
  if (type == "ByteLevel") return {};  // it changes offsets alone
  if (type == "BertProcessing" || type == "RobertaProcessing")
    return bert_ends(Fields(step, where, {"cls", "sep", "trim_offsets", "add_prefix_space"}));
  if (type != "TemplateProcessing")
    refuse_step(where, type, "Sequence, ByteLevel, TemplateProcessing, BertProcessing and RobertaProcessing");
  const Fields fields(step, where, {"single", "pair", "special_tokens"});
  std::vector<std::string> before, behind;
  bool text = false;
  for (const json& part : fields.list("single")) {
    if (part.is_object() && part.contains("Sequence")) {
      text = true;
      continue;
    }
    const Fields token(part, where + ".single", {"SpecialToken"});
    (text ? behind : before)
        .push_back(Fields(token.value("SpecialToken"), where + ".single", {"id", "type_id"}).text("id"));
  }
  if (!text) fail(ErrorKind::data, where, ".single has no place for the text");
  if (before.size() > 1) fail(ErrorKind::data, where, " puts more than one token in front of a text");
  EndTokens out;
  if (!before.empty()) out.begin = {before[0], id_of_special(fields, before[0])};
  if (behind.size() == 1) out.end = {behind[0], id_of_special(fields, behind[0])};
  return out;
}

AddedToken added_token(const json& token, const std::string& where) {
  const Fields fields(token, where,
                      {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  const bool special = fields.flag("special", false);
  const std::string content = fields.text("content");
  return {checked_id(fields.integer("id"), content),
          content,
          fields.flag("single_word", false),
          fields.flag("lstrip", false),
          fields.flag("rstrip", false),
          fields.flag("normalized", !special),
          special};
}

/// The package numbers added tokens itself: as in the vocabulary, else behind it in the order of the file.
void check_ids(const TokenizerFile& file) {
  std::unordered_map<std::string, std::int32_t> ids;
  for (const auto& [token, id] : file.model.vocabulary) ids[token] = id;
  auto next = static_cast<std::int32_t>(file.model.vocabulary.size());
  for (const AddedToken& token : file.added) {
    const auto [known, fresh] = ids.try_emplace(token.content, next);
    next += fresh;
    if (known->second != token.id)
      fail(ErrorKind::data, "added token '", excerpt(token.content), "' has the id ", token.id,
           ", and the tokenizers package gives it ", known->second, "; load the file there and save it anew");
  }
}

TokenizerFile tokenizer_file_of(const json& object) {
  const Fields root(object, "the file",
                    {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     "post_processor", "decoder", "model"});
  if (root.text("version", "1.0") != "1.0")
    fail(ErrorKind::data, "the file is of version '", excerpt(root.text("version")), "', and 1.0 is read");
  TokenizerFile out;
  read_model(root.value("model"), out);
  if (root.has("added_tokens")) {
    std::size_t index = 0;
    for (const json& each : root.list("added_tokens"))
      // One without a text is none, to the package too.
      if (AddedToken token = added_token(each, cat("added_tokens[", index++, "]")); !token.content.empty())
        out.added.push_back(std::move(token));
  }
  check_ids(out);
  if (root.has("normalizer")) out.normalizer = normalizer_steps(root.value("normalizer"));
  if (root.has("pre_tokenizer")) out.pre_tokenizer = pre_tokenizer_steps(root.value("pre_tokenizer"));
  out.model.byte_level =
      !out.pre_tokenizer.empty() && out.pre_tokenizer.back().kind == PreTokenizerKind::byte_level;
  if (root.has("decoder")) out.decoder = decoder_steps(root.value("decoder"));
  if (root.has("post_processor"))
    each_step(root.value("post_processor"), "post_processor", "processors", [&](const auto&... step) {
      const auto [begin, end] = ends_of(step...);
      // The step's table counts, as files that were trained anew have another there than the vocabulary.
      const auto known = [&](const EndToken& at, const char* place) {
        const std::string token = out.token_of(at.id);
        if (token.empty())
          fail(ErrorKind::data, "post_processor puts '", excerpt(at.token), "' with the id ", at.id, place,
               " a text, which no token has");
        return token;
      };
      if (!begin.token.empty()) out.begin = known(begin, " in front of");
      if (!end.token.empty()) out.end = known(end, " behind");
    });
  return out;
}

}  // namespace

std::string TokenizerFile::token_of(std::int64_t id) const {
  // The last of one id counts.
  for (auto token = added.rbegin(); token != added.rend(); ++token)
    if (token->id == id) return token->content;
  for (const auto& [token, of_token] : model.vocabulary)
    if (of_token == id) return token;
  return {};
}

TokenizerFile parse_tokenizer_file(const std::string& bytes) {
  try {
    return tokenizer_file_of(json::parse(bytes));
  } catch (const json::exception& error) {
    fail(ErrorKind::data, "the file is no JSON: ", excerpt(error.what(), 300));
  }
}

}  // namespace sherd::data
