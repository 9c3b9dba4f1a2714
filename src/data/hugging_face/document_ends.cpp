#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/excerpt.h"
#include "data/hugging_face/tokenizer_file.h"

namespace sherd::data {
namespace {

using nlohmann::json;

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
