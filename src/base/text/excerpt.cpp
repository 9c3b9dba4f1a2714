#include "base/text/excerpt.h"

#include "base/text/utf8.h"

namespace sherd {
namespace {

std::string escaped(char c) {
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  constexpr const char* digits = "0123456789abcdef";
  const auto byte = static_cast<unsigned char>(c);
  return {'\\', 'x', digits[byte / 16], digits[byte % 16]};
}

/// U+0080 to U+009F, which some terminals obey.
bool is_c1_control(std::string_view character) {
  return character.size() == 2 && character[0] == '\xc2' && static_cast<unsigned char>(character[1]) < 0xa0;
}

bool is_control(std::string_view character) {
  const auto byte = static_cast<unsigned char>(character[0]);
  return byte < 0x20 || byte == 0x7f || is_c1_control(character);
}

}  // namespace

std::string excerpt(std::string_view text, std::size_t most) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const std::string_view character = text.substr(0, length == 0 ? 1 : length);
    std::string shown(character);
    if (length == 0 || is_control(character)) {
      shown.clear();
      for (const char c : character) shown += escaped(c);
    }
    if (out.size() + shown.size() > most) return out + "…";
    out += shown;
    text.remove_prefix(character.size());
  }
  return out;
}

}  // namespace sherd
