#include "data/text/json_line.h"

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace sherd::data {

void fail_at_line(const std::filesystem::path& file, std::int64_t line_number) {
  const std::string place = cat("'", file.string(), "', line ", line_number, ", ");
  try {
    throw;
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::data, place, "is no JSON: ", excerpt(error.what(), 300),
         "; a .jsonl file holds one object per line");
  } catch (const Error& error) {
    fail(error.kind(), place, error.what());
  }
}

}  // namespace sherd::data
