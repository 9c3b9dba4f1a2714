#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/excerpt.h"
#include "data/text_source.h"

namespace sherd::data {

std::string text_of_json(const std::string& line, const std::string& field, const std::filesystem::path& file,
                         std::int64_t line_number) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::data, "'", file.string(), "', line ", line_number,
         ", is no JSON: ", excerpt(error.what(), 300), "; a .jsonl file holds one object per line");
  }
  const auto text = object.is_object() ? object.find(field) : object.end();
  if (!object.is_object() || text == object.end() || !text->is_string())
    fail(ErrorKind::data, "'", file.string(), "', line ", line_number, ", has no string '", excerpt(field),
         "'; name the field that holds the text");
  return text->get<std::string>();
}

}  // namespace sherd::data
