#pragma once

#include <vector>

#include "data/text/example.h"

namespace sherd::data {

/// The texts of an object, nlohmann's ordered_json, that holds preferences, as read_examples() says; none: it
/// holds none. Throws Error{data}, without the place.
template <class Object>
std::vector<Example> preferences_in(const Object& object, const ExampleOptions& options);

}  // namespace sherd::data
