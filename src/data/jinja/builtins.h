#pragma once

#include <string>

#include "data/jinja/value.h"

namespace sherd::data::jinja {

/// The names of a table, for errors.
template <class Table>
std::string names_in(const Table& table) {
  std::string out;
  for (const auto& [name, function] : table) out += (out.empty() ? "" : ", ") + name;
  return out;
}

/// The pairs of a dictionary, as tuples; none of what is undefined.
List pairs_of(const Value& value);

/// The filter `name` of `value`, as Jinja has it. Throws for one that is not here, naming it.
Value filter(const std::string& name, const Value& value, Arguments& arguments);
/// Likewise a test, "defined".
bool test(const std::string& name, const Value& value, Arguments& arguments);
/// The method of that name, of a text, list or dictionary, as Python has it; undefined: there is none.
Value method(const Value& of, const std::string& name);
/// An item by key, or an attribute: of dictionaries and lists; undefined where it is not there.
Value attribute(const Value& of, const Value& key);
/// range, dict, namespace, raise_exception and strftime_now; undefined for other names.
Value global(const std::string& name);

}  // namespace sherd::data::jinja
