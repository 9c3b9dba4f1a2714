#pragma once

#include <vector>

#include "data/text/conversation_json.h"
#include "data/text/example.h"

namespace sherd::data {

/// The texts of an object that holds preferences, as read_examples() says; none: it holds none. Throws
/// Error{data}, without the place.
std::vector<Example> preferences_in(const Json& object, const ExampleOptions& options);

}  // namespace sherd::data
