#include "data/hugging_face/files_beside.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

using nlohmann::json;

json object_of(const FilesBeside& beside, const std::string& name) {
  const std::string text = beside(name);
  if (text.empty()) return json::object();
  try {
    json object = json::parse(text);
    return object.is_object() ? object : json::object();
  } catch (const json::exception& error) {
    fail(ErrorKind::data, "'", name, "' is no JSON: ", excerpt(error.what(), 300),
         "; it lies beside the tokenizer");
  }
}

json added_token(const std::string& content, bool special) {
  return {{"content", content},   {"special", special}, {"normalized", !special},
          {"single_word", false}, {"lstrip", false},    {"rstrip", false}};
}

/// A token as a text, or as an object with its properties; null: neither.
json token_of(const json& said, bool special) {
  if (said.is_string()) return added_token(said.get<std::string>(), special);
  if (!said.is_object() || !said.contains("content") || !said["content"].is_string()) return nullptr;
  json token = added_token(said["content"].get<std::string>(),
                           special || (said.contains("special") && said["special"] == true));
  for (const char* key : {"normalized", "single_word", "lstrip", "rstrip"})
    if (said.contains(key) && said[key].is_boolean()) token[key] = said[key];
  return token;
}

/// Special tokens by their part in the model, then those without one.
std::vector<json> special_tokens(const json& settings) {
  std::vector<json> out;
  const auto take = [&](const json& said) {
    if (json token = token_of(said, true); !token.is_null()) out.push_back(std::move(token));
  };
  for (const char* key :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    if (settings.contains(key)) take(settings[key]);
  for (const char* key : {"extra_special_tokens", "additional_special_tokens"})
    if (settings.contains(key) && settings[key].is_structured())
      for (const json& said : settings[key]) take(said);
  return out;
}

/// A token that the files name, and whether it replaces a tokenizer.json's of the same content.
struct Named {
  json token;
  bool replaces;
};

std::vector<Named> named_beside(const FilesBeside& beside, const std::function<bool(std::int64_t)>& has_id) {
  json settings = object_of(beside, "tokenizer_config.json");
  std::map<std::int64_t, json> by_id;
  std::vector<json> special;
  if (settings.contains("added_tokens_decoder") && settings["added_tokens_decoder"].is_object()) {
    special = special_tokens(settings);
    for (const auto& [id, said] : settings["added_tokens_decoder"].items())
      if (json token = token_of(said, false); !token.is_null()) by_id[std::atoll(id.c_str())] = token;
  } else {
    settings.update(object_of(beside, "special_tokens_map.json"));
    special = special_tokens(settings);
    const json ids = object_of(beside, "added_tokens.json");
    for (const auto& [content, id] : ids.items()) {
      const auto is_it = [&, &text = content](const json& token) { return token["content"] == text; };
      if (id.is_number_integer() && !has_id(id.get<std::int64_t>()))
        by_id[id.get<std::int64_t>()] =
            added_token(content, std::any_of(special.begin(), special.end(), is_it));
    }
  }
  std::vector<Named> out;
  for (auto& [id, token] : by_id) out.push_back({std::move(token), true});
  for (json& token : special) out.push_back({std::move(token), false});
  return out;
}

/// A file's object; an empty one where there is none.
json object_in(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return json::object();
  try {
    return json::parse(in);
  } catch (const json::exception& error) {
    fail(ErrorKind::data, "'", path.string(), "' is no JSON: ", excerpt(error.what(), 300));
  }
}

void read_end(const json& object, DocumentEnds& out) {
  if (!object.is_object() || !out.end.empty() || out.end_id) return;
  if (const auto token = object.find("eos_token"); token != object.end()) {
    if (token->is_string()) out.end = token->get<std::string>();
    if (token->is_object() && token->contains("content") && (*token)["content"].is_string())
      out.end = (*token)["content"].get<std::string>();
  }
  const auto id = object.find("eos_token_id");
  if (!out.end.empty() || id == object.end()) return;
  const json& first = id->is_array() && !id->empty() ? id->front() : *id;
  if (first.is_number_integer()) out.end_id = first.get<std::int32_t>();
}

}  // namespace

std::string with_tokens_beside(std::string tokenizer_json, const FilesBeside& beside) {
  json file = json::parse(tokenizer_json, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object() || !file.contains("model") || !file["model"].is_object() ||
      !file["model"].contains("vocab") || !file["model"]["vocab"].is_object())
    return tokenizer_json;
  const json& vocabulary = file["model"]["vocab"];
  json& added = file["added_tokens"];
  if (added.is_null()) added = json::array();
  if (!added.is_array()) return tokenizer_json;
  std::map<std::string, std::size_t> known;
  std::set<std::int64_t> ids;
  for (const json& token : added) {
    if (!token.is_object() || !token.contains("content") || !token["content"].is_string() ||
        !token.contains("id") || !token["id"].is_number_integer())
      return tokenizer_json;  // whose reader says what is wrong
    known.emplace(token["content"].get<std::string>(), known.size());
    ids.insert(token["id"].get<std::int64_t>());
  }
  if (known.size() != added.size()) return tokenizer_json;
  auto next = static_cast<std::int64_t>(vocabulary.size());
  if (!ids.empty()) next = std::max(next, *ids.rbegin() + 1);
  const json before = added;
  for (auto& [token, replaces] : named_beside(beside, [&](std::int64_t id) { return ids.contains(id); })) {
    const std::string content = token["content"].get<std::string>();
    if (content.empty()) continue;
    if (const auto at = known.find(content); at != known.end()) {
      if (replaces) added[at->second].update(token);
      continue;
    }
    const auto found = vocabulary.find(content);
    token["id"] = found != vocabulary.end() ? *found : json(next++);
    known.emplace(content, added.size());
    added.push_back(std::move(token));
  }
  return added == before ? tokenizer_json : file.dump(-1, ' ', false, json::error_handler_t::replace);
}

DocumentEnds document_ends_beside(const std::filesystem::path& folder) {
  DocumentEnds out;
  for (const char* name :
       {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"}) {
    const bool of_tokenizer = name == std::string_view("tokenizer_config.json");
    if (!of_tokenizer && (!out.end.empty() || out.end_id)) break;
    const json object = object_in(folder / name);
    read_end(object, out);
    if (!of_tokenizer || !object.is_object()) continue;
    out.without_begin = object.contains("add_bos_token") && object["add_bos_token"] == false;
    if (object.contains("add_prefix_space") && object["add_prefix_space"].is_boolean())
      out.prefix_space = object["add_prefix_space"].get<bool>();
  }
  return out;
}

}  // namespace sherd::data
