#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sherd {

/// A count with its noun, which takes an s but for one: "1 thread", "2 threads".
inline std::string counted(std::int64_t n, std::string_view noun) {
  std::string out = std::to_string(n);
  out.append(" ").append(noun);
  if (n != 1) out += 's';
  return out;
}

}  // namespace sherd
