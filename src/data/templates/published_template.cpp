#include "data/templates/published_template.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"

namespace sherd::data {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const std::string& jinja_file, const Json& settings) {
  if (!jinja_file.empty()) return jinja_file;
  if (!settings.is_object() || !settings.contains("chat_template")) return {};
  const Json& found = settings["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  if (found.is_array())
    for (const Json& named : found)
      if (named.is_object() && named.contains("name") && named["name"] == "default" &&
          named.contains("template") && named["template"].is_string())
        return named["template"].get<std::string>();
  return {};
}

Json settings_in(const FilesBeside& files, const char* name) {
  return Json::parse(files(name), nullptr, /*allow_exceptions=*/false);
}

/// The special tokens that transformers names for a template.
jinja::Dict tokens_in(const FilesBeside& files) {
  const Json config = settings_in(files, "tokenizer_config.json"),
             map = settings_in(files, "special_tokens_map.json");
  jinja::Dict out;
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    for (const Json* from : {&config, &map}) {
      if (!from->is_object() || !from->contains(name)) continue;
      const Json& said = (*from)[name];
      const Json token = said.is_object() ? said.value("content", Json()) : said;
      if (!token.is_string()) continue;
      out.emplace_back(name, token.get<std::string>());
      break;
    }
  return out;
}

}  // namespace

std::optional<ChatTemplate> published_template(const FilesBeside& files, const Tokenizer& tokenizer,
                                               const std::string& whose) {
  const std::string text = text_of(files("chat_template.jinja"), settings_in(files, "tokenizer_config.json"));
  if (text.empty()) return std::nullopt;
  try {
    return ChatTemplate::of_text(text, tokens_in(files), tokenizer);
  } catch (const Error& error) {
    fail(ErrorKind::config, whose, "'s own: ", error.what(),
         "; give --chat-template chatml, llama3, mistral, plain or the file of another, or write texts of "
         "your "
         "own (`prompt` and `completion`)");
  }
}

ChatTemplate chosen_template(const std::string& name, const FilesBeside& files, const Tokenizer& tokenizer) {
  const bool is_file = name.find('/') != std::string::npos || name.ends_with(".jinja");
  if (!is_file) return ChatTemplate::named(name, tokenizer);
  try {
    return ChatTemplate::of_text(read_file(name), tokens_in(files), tokenizer);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    fail(ErrorKind::config, "'", name, "': ", error.what());
  }
}

}  // namespace sherd::data
