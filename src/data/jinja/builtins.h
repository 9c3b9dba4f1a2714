#pragma once

#include <string>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/jinja/value.h"

namespace sherd::data::jinja {

/// The function of a table by its name. Throws for one that is not there, naming all that are. `what`:
/// "filter".
template <class Table>
const auto& function_of(const Table& table, const char* what, const std::string& name) {
  const auto found = table.find(name);
  if (found != table.end()) return found->second;
  template_error(cat("Sherd does not know the ", what, " '", excerpt(name, 40), "' of Jinja; there are ",
                     joined_text(table, ", ", &Table::value_type::first)));
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
