#include "config/bytes.h"

#include <cctype>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace sherd::config {

std::optional<std::uint64_t> bytes_of(const std::string& text) {
  constexpr std::pair<std::string_view, double> units[] = {{"B", 1},        {"KB", 1e3},     {"MB", 1e6},
                                                           {"GB", 1e9},     {"TB", 1e12},    {"KiB", 0x1p10},
                                                           {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  char* end = nullptr;
  const double amount = std::strtod(text.c_str(), &end);
  std::string_view unit(end);
  while (!unit.empty() && std::isspace(static_cast<unsigned char>(unit.front()))) unit.remove_prefix(1);
  if (end == text.c_str() || !(amount >= 0)) return {};
  for (const auto& [name, factor] : units)
    if (unit == name && amount * factor < 0x1p63) return static_cast<std::uint64_t>(amount * factor);
  return {};
}

}  // namespace sherd::config
