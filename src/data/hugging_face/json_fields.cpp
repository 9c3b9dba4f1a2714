#include "data/hugging_face/json_fields.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {

using nlohmann::json;

Fields::Fields(const json& object, std::string where, const std::vector<std::string>& known)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) fail(ErrorKind::data, where_, " is no object");
  for (const auto& [key, value] : object.items())
    if (key != "type" && std::find(known.begin(), known.end(), key) == known.end())
      fail(ErrorKind::data, where_, " has a key '", excerpt(key), "', which is not known here");
}

bool Fields::has(const char* key) const {
  return object_.contains(key) && !object_[key].is_null();
}

const json& Fields::value(const char* key) const {
  if (!has(key)) fail(ErrorKind::data, where_, " has no '", key, "'");
  return object_[key];
}

std::string Fields::text(const char* key, const char* absent) const {
  if (absent && !has(key)) return absent;
  if (!value(key).is_string()) fail(ErrorKind::data, where_, ".", key, " is no string");
  return value(key).get<std::string>();
}

bool Fields::flag(const char* key, bool absent) const {
  if (!has(key)) return absent;
  if (!value(key).is_boolean()) fail(ErrorKind::data, where_, ".", key, " is neither true nor false");
  return value(key).get<bool>();
}

std::int64_t Fields::integer(const char* key) const {
  if (!value(key).is_number_integer()) fail(ErrorKind::data, where_, ".", key, " is no integer");
  return value(key).get<std::int64_t>();
}

const json& Fields::list(const char* key) const {
  if (!value(key).is_array()) fail(ErrorKind::data, where_, ".", key, " is no list");
  return value(key);
}

std::string type_of(const json& object, const std::string& where) {
  if (!object.is_object() || !object.contains("type") || !object["type"].is_string())
    fail(ErrorKind::data, where, " has no 'type'");
  return object["type"].get<std::string>();
}

void refuse_step(const std::string& where, const std::string& type, const char* known) {
  fail(ErrorKind::data, where, " is of the type '", excerpt(type), "', which is not supported; known are ",
       known);
}

void each_step(const json& part, const std::string& where, const char* key,
               const std::function<void(const json&, const std::string&, const std::string&)>& one) {
  if (part.is_null()) return;
  const std::string type = type_of(part, where);
  if (type != "Sequence") return one(part, type, where);
  const Fields fields(part, where, {key});
  std::size_t index = 0;
  for (const json& step : fields.list(key))
    each_step(step, cat(where, ".", key, "[", index++, "]"), key, one);
}

std::int32_t checked_id(std::int64_t id, const std::string& token) {
  constexpr std::int64_t most = std::int64_t{1} << 24;
  if (id < 0 || id >= most)
    fail(ErrorKind::data, "'", excerpt(token), "' has id ", id, ", and ids are 0 to ", most - 1);
  return static_cast<std::int32_t>(id);
}

}  // namespace sherd::data
