#include "models/gguf/gguf_specials.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"

namespace sherd::models {
namespace {

using Json = nlohmann::ordered_json;

Json object_of(const std::string& text) {
  Json out = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return out.is_object() ? out : Json::object();
}

/// A token's text, where files name it by that or as an object.
std::string content_of(const Json& object, const char* key) {
  const Json& token = object.contains(key) ? object[key] : Json();
  if (token.is_string()) return token.get<std::string>();
  return token.is_object() ? token.value("content", "") : "";
}

/// The ids that end an answer, as the files beside say.
std::vector<std::int64_t> ends_beside(const std::function<std::string(const std::string&)>& beside) {
  std::vector<std::int64_t> out;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const Json file = object_of(beside(name)), ids = file.value("eos_token_id", Json());
    for (const Json& id : ids.is_array() ? ids : Json::array({ids}))
      if (id.is_number_integer()) out.push_back(id.get<std::int64_t>());
    if (!out.empty()) break;
  }
  return out;
}

}  // namespace

void describe_specials(GgufMetadata& to, const GgufTokenizer& tokenizer, const TokenIds& ids, TextEnds side,
                       bool words, const std::string& usual_end) {
  const Json config = object_of(tokenizer.beside("tokenizer_config.json"));
  const auto id_of = [&](const std::string& token) -> std::optional<std::int64_t> {
    const auto found = ids.find(token);
    return found == ids.end() || found->second >= tokenizer.ids ? std::nullopt : std::optional(found->second);
  };
  if (config.value("add_bos_token", Json()) == false) side.begin.clear();
  const std::vector<std::int64_t> ends = ends_beside(tokenizer.beside);
  std::optional<std::int64_t> end = id_of(side.end.empty() ? content_of(config, "eos_token") : side.end);
  if (!end && !ends.empty()) end = ends[0];
  if (!end) end = id_of(usual_end);
  if (!end)
    fail(ErrorKind::config,
         "no file says which token ends a text: name it as eos_token in the tokenizer_config.json "
         "that the model came with, or train with data whose tokenizer has one");
  std::optional<std::int64_t> begin =
      id_of(side.begin.empty() ? content_of(config, "bos_token") : side.begin);
  to.set("tokenizer.ggml.bos_token_id", begin.value_or(*end));
  to.set("tokenizer.ggml.eos_token_id", *end);
  for (const std::int64_t other : ends)
    if (other != *end) {
      to.set("tokenizer.ggml.eot_token_id", other);
      break;
    }
  if (words) to.set("tokenizer.ggml.seperator_token_id", *end);
  for (const auto& [name, key] : {std::pair("pad_token", "padding"), {"mask_token", "mask"}})
    if (const auto id = id_of(content_of(config, name)))
      to.set(cat("tokenizer.ggml.", key, "_token_id"), *id);
  to.set("tokenizer.ggml.add_bos_token", GgufValue(!side.begin.empty()));
  to.set("tokenizer.ggml.add_eos_token", GgufValue(!side.end.empty() && !words));
}

void describe_template(GgufMetadata& to, const GgufTokenizer& tokenizer) {
  std::string text = tokenizer.beside("chat_template.jinja");
  const Json config = object_of(tokenizer.beside("tokenizer_config.json"));
  const Json there = config.value("chat_template", Json());
  if (text.empty() && there.is_string()) text = there.get<std::string>();
  if (text.empty() && there.is_array())
    for (const Json& each : there)
      if (each.value("name", "") == "default") text = each.value("template", "");
  if (!text.empty()) to.set("tokenizer.chat_template", GgufValue(text));
}

}  // namespace sherd::models
