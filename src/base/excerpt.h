#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sherd {

/// `text` as a message may quote it: on one line, with control characters and bytes that are no UTF-8 escaped
/// ("\n",
/// "\x1b"); of more than `most` bytes only the beginning, then "…".
std::string excerpt(std::string_view text, std::size_t most = 120);

}  // namespace sherd
