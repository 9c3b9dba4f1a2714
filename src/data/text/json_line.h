#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/text/excerpt.h"

// Readers of .jsonl files share this.
namespace sherd::data {

/// The keys of an object (a nlohmann::json), for errors.
template <class Json>
std::string keys_of(const Json& object) {
  std::string keys;
  for (const auto& [key, value] : object.items()) keys += (keys.empty() ? "'" : ", '") + excerpt(key) + "'";
  return keys.empty() ? "none" : keys;
}

/// Throws anew what is being caught, with the place in front: an Error, or as Error{data} what the parser
/// threw.
[[noreturn]] void fail_at_line(const std::filesystem::path& file, std::int64_t line_number);

/// The result of `read` for a line; its errors name the place.
template <class F>
auto at_line(const std::filesystem::path& file, std::int64_t line_number, const F& read) {
  try {
    return read();
  } catch (...) {
    fail_at_line(file, line_number);
  }
}

}  // namespace sherd::data
