#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sherd {

/// `text` as a message may quote it: on one line, with control characters and bytes that are no UTF-8 escaped
/// ("\n", "\x1b"); of more than `most` bytes only the beginning, then "…".
std::string excerpt(std::string_view text, std::size_t most = 120);

/// A count with its noun, which takes an s but for one: "1 thread", "2 threads".
inline std::string counted(std::int64_t n, std::string_view noun) {
  std::string out = std::to_string(n);
  out.append(" ").append(noun);
  if (n != 1) out += 's';
  return out;
}

}  // namespace sherd
