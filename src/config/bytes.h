#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sherd::config {

/// How numbers of bytes may be written, for errors and pages.
inline constexpr const char* bytes_form = "bytes, or a string with a unit such as \"512MiB\" or \"8GB\"";

/// The bytes of a text such as "512MiB", "8GB" or "100 B"; nothing where it is none.
std::optional<std::uint64_t> bytes_of(const std::string& text);

}  // namespace sherd::config
