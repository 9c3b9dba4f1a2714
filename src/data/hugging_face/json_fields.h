#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sherd::data {

/// An object of the file, whose keys are all known. Members throw Error{data} naming the place.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string where, const std::vector<std::string>& known);

  const std::string& where() const { return where_; }
  bool has(const char* key) const;  ///< null counts as none
  const nlohmann::json& value(const char* key) const;
  std::string text(const char* key, const char* absent = nullptr) const;
  bool flag(const char* key, bool absent) const;
  std::int64_t integer(const char* key) const;
  const nlohmann::json& list(const char* key) const;

 private:
  const nlohmann::json& object_;
  std::string where_;
};

/// The object's "type". Throws Error{data} where it has none.
std::string type_of(const nlohmann::json& object, const std::string& where);

/// Throws Error{data}: a step of that type is not supported, and these are.
[[noreturn]] void refuse_step(const std::string& where, const std::string& type, const char* known);

/// Calls `one` with each step of a part, its type and its place: of a Sequence those in its list `key`.
void each_step(const nlohmann::json& part, const std::string& where, const char* key,
               const std::function<void(const nlohmann::json&, const std::string&, const std::string&)>& one);

/// Ids index tables: one that is far beyond any vocabulary is a mistake of the file. Throws Error{data}.
std::int32_t checked_id(std::int64_t id, const std::string& token);

}  // namespace sherd::data
