#pragma once

#include <string_view>

namespace sherd {

/// "0.3.0": the version of the library that is linked.
std::string_view version();

}  // namespace sherd
