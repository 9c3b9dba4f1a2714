#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

// Json is nlohmann's, for which sources alone know these (third parties appear in no header).
namespace sherd::data {

/// An object of the file, whose keys are all known. Members throw Error{data} naming the place.
template <class Json>
class JsonFields {
 public:
  JsonFields(const Json& object, std::string where, const std::vector<std::string>& known);

  const std::string& where() const { return where_; }
  bool has(const char* key) const;  ///< null counts as none
  const Json& value(const char* key) const;
  std::string text(const char* key, const char* absent = nullptr) const;
  bool flag(const char* key, bool absent) const;
  std::int64_t integer(const char* key) const;
  const Json& list(const char* key) const;

 private:
  const Json& object_;
  std::string where_;
};

/// The object's "type". Throws Error{data} where it has none.
template <class Json>
std::string type_of(const Json& object, const std::string& where);

/// Throws Error{data}: a step of that type is not supported, and these are.
[[noreturn]] void refuse_step(const std::string& where, const std::string& type, const char* known);

/// Calls `one` with each step of a part, its type and its place: of a Sequence those in its list `key`.
template <class Json>
void each_step(const Json& part, const std::string& where, const char* key,
               const std::function<void(const std::type_identity_t<Json>&, const std::string&,
                                        const std::string&)>& one);

/// Ids index tables: one that is far beyond any vocabulary is a mistake of the file. Throws Error{data}.
std::int32_t checked_id(std::int64_t id, const std::string& token);

}  // namespace sherd::data
