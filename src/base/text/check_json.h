#pragma once

#include <string_view>

namespace sherd {

/// Throws Error{data} saying what is wrong unless `text` is one JSON value in which no object has a key
/// twice, nothing is nested deeper than 16 levels and no list has more than 4096 items: what nlohmann::json
/// then makes of it is what the file says, and is no larger than the text suggests. Takes time linear in the
/// text's length, but for a logarithm.
void check_json(std::string_view text);

}  // namespace sherd
