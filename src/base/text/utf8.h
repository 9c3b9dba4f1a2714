#pragma once

#include <cstddef>
#include <string_view>

namespace sherd {

/// Bytes of the UTF-8 character at the front of `text`, or 0 when it begins with none (a stray or truncated
/// sequence, an overlong form, a surrogate, a value beyond U+10FFFF). `text` is not empty.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const unsigned char second = byte(1);
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
      (lead == 0xF4 && second > 0x8F))
    return 0;
  return length;
}

/// Bytes of `text` that are part of no valid UTF-8 character.
inline std::size_t invalid_utf8_bytes(std::string_view text) {
  std::size_t invalid = 0;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    invalid += length == 0;
    text.remove_prefix(length ? length : 1);
  }
  return invalid;
}

}  // namespace sherd
