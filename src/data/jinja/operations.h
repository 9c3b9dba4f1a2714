#pragma once

#include <string>

#include "data/jinja/value.h"

namespace sherd::data::jinja {

/// a + b and so on, for "+", "-", "*", "/", "//", "%" and "**". Throws for values that have none.
Value calculated(const std::string& sign, const Value& a, const Value& b);
/// For "==", "!=", "<", "<=", ">", ">=", "in" and "not in".
bool compared(const std::string& sign, const Value& a, const Value& b);
/// The name `loop` in a turn of a loop over these.
Value loop_of(const List& items, std::size_t index);

}  // namespace sherd::data::jinja
