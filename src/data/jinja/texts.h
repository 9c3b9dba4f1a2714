#pragma once

#include <string>
#include <string_view>

#include "data/jinja/value.h"

// Python's methods of strings, as filters have them, too.
namespace sherd::data::jinja {

/// Throws where it is no string; `what` takes it.
const std::string& text_of(const Value& value, const char* what);
/// The text without what strip() takes away: the characters of `which`, or, null or no string, white space.
std::string stripped(std::string_view text, const Value* which, bool front, bool back);
/// The first `most` of them, below 0 all.
std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     std::int64_t most);
std::string lower(std::string_view text);
std::string upper(std::string_view text);
/// Words with a capital first letter; `once`: the first one alone.
std::string titled(std::string_view text, bool once);
std::string joined(const Value& value, const std::string& by);
/// The number of that name or place; -1: not given.
std::int64_t limit_of(Arguments& arguments, const char* name);

/// The method of that name, of a text; undefined: there is none.
Value text_method(const std::string& text, const std::string& name);

}  // namespace sherd::data::jinja
