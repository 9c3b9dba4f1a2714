#include "data/hugging_face/json_fields.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {

template <class Json>
JsonFields<Json>::JsonFields(const Json& object, std::string where, const std::vector<std::string>& known)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) fail(ErrorKind::data, where_, " is no object");
  for (const auto& [key, value] : object.items())
    if (key != "type" && std::find(known.begin(), known.end(), key) == known.end())
      fail(ErrorKind::data, where_, " has a key '", excerpt(key), "', which is not known here");
}

template <class Json>
bool JsonFields<Json>::has(const char* key) const {
  return object_.contains(key) && !object_[key].is_null();
}

template <class Json>
const Json& JsonFields<Json>::value(const char* key) const {
  if (!has(key)) fail(ErrorKind::data, where_, " has no '", key, "'");
  return object_[key];
}

template <class Json>
std::string JsonFields<Json>::text(const char* key, const char* absent) const {
  if (absent && !has(key)) return absent;
  if (!value(key).is_string()) fail(ErrorKind::data, where_, ".", key, " is no string");
  return value(key).template get<std::string>();
}

template <class Json>
bool JsonFields<Json>::flag(const char* key, bool absent) const {
  if (!has(key)) return absent;
  if (!value(key).is_boolean()) fail(ErrorKind::data, where_, ".", key, " is neither true nor false");
  return value(key).template get<bool>();
}

template <class Json>
std::int64_t JsonFields<Json>::integer(const char* key) const {
  if (!value(key).is_number_integer()) fail(ErrorKind::data, where_, ".", key, " is no integer");
  return value(key).template get<std::int64_t>();
}

template <class Json>
const Json& JsonFields<Json>::list(const char* key) const {
  if (!value(key).is_array()) fail(ErrorKind::data, where_, ".", key, " is no list");
  return value(key);
}

template <class Json>
std::string type_of(const Json& object, const std::string& where) {
  if (!object.is_object() || !object.contains("type") || !object["type"].is_string())
    fail(ErrorKind::data, where, " has no 'type'");
  return object["type"].template get<std::string>();
}

void refuse_step(const std::string& where, const std::string& type, const char* known) {
  fail(ErrorKind::data, where, " is of the type '", excerpt(type), "', which is not supported; known are ",
       known);
}

template <class Json>
void each_step(const Json& part, const std::string& where, const char* key,
               const std::function<void(const std::type_identity_t<Json>&, const std::string&,
                                        const std::string&)>& one) {
  if (part.is_null()) return;
  constexpr std::size_t most = 4000;  // letters of a place; each step within another adds some
  if (where.size() > most) fail(ErrorKind::data, "steps of ", key, " lie too deep within each other");
  const std::string type = type_of(part, where);
  if (type != "Sequence") return one(part, type, where);
  const JsonFields<Json> fields(part, where, {key});
  std::size_t index = 0;
  for (const Json& step : fields.list(key))
    each_step<Json>(step, cat(where, ".", key, "[", index++, "]"), key, one);
}

template class JsonFields<nlohmann::json>;
template std::string type_of(const nlohmann::json&, const std::string&);
template void each_step(
    const nlohmann::json&, const std::string&, const char*,
    const std::function<void(const nlohmann::json&, const std::string&, const std::string&)>&);

std::int32_t checked_id(std::int64_t id, const std::string& token) {
  constexpr std::int64_t most = std::int64_t{1} << 24;
  if (id < 0 || id >= most)
    fail(ErrorKind::data, "'", excerpt(token), "' has id ", id, ", and ids are 0 to ", most - 1);
  return static_cast<std::int32_t>(id);
}

}  // namespace sherd::data
