#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/error.h"

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

/// The items, or what `write` makes of each, as cat() writes them, with `between` between them.
template <class Range, class Write = std::identity>
std::string joined_text(const Range& range, std::string_view between = ", ", const Write& write = {}) {
  std::string out;
  for (const auto& item : range) out += cat(out.empty() ? "" : between, std::invoke(write, item));
  return out;
}

}  // namespace sherd
