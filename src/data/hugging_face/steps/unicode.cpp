#include "data/hugging_face/steps/unicode.h"

#include <unicode/uchar.h>
#include <unicode/ustring.h>
#include <unicode/utf16.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "base/text/utf8.h"

namespace sherd::data {
namespace {

unsigned char byte_at(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

/// Bytes that stand for one U+FFFD at the front of text that begins with no character.
std::size_t invalid_length(std::string_view text) {
  const unsigned char lead = byte_at(text, 0);
  const std::size_t whole = lead >= 0xC2 && lead <= 0xDF   ? 2
                            : lead >= 0xE0 && lead <= 0xEF ? 3
                            : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                           : 1;
  std::size_t length = 1;
  for (; length < whole && length < text.size(); ++length) {
    const unsigned char byte = byte_at(text, length);
    const unsigned char least = length > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char most = length > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte < least || byte > most) break;
  }
  return length;
}

/// Where the first byte lies that is part of no character.
std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (at + 8 <= text.size()) {
      std::uint64_t eight = 0;
      std::memcpy(&eight, text.data() + at, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        at += 8;
        continue;
      }
    }
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

struct ByteAlphabet {
  std::array<char32_t, 256> written{};
  std::array<std::int16_t, 0x180> bytes{};

  constexpr ByteAlphabet() {
    bytes.fill(-1);
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      written[byte] = printable ? byte : next++;
      bytes[written[byte]] = static_cast<std::int16_t>(byte);
    }
  }
};

constexpr ByteAlphabet byte_alphabet;  // so that tokenizers may be static objects of others

}  // namespace

std::string_view valid_utf8(std::string_view text, std::string& storage) {
  std::size_t valid = valid_prefix(text);
  if (valid == text.size()) return text;
  storage.clear();
  while (true) {
    storage.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return storage;
    storage += "\xef\xbf\xbd";
    text.remove_prefix(invalid_length(text));
    valid = valid_prefix(text);
  }
}

char32_t first_character(std::string_view text) {
  const unsigned char lead = byte_at(text, 0);
  if (lead < 0x80) return lead;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  char32_t character = lead & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) character = character << 6 | (byte_at(text, i) & 0x3Fu);
  return character;
}

std::size_t last_length(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (byte_at(text, at) & 0xC0) == 0x80) --at;
  return text.size() - at;
}

char32_t last_character(std::string_view text) {
  return first_character(text.substr(text.size() - last_length(text)));
}

void append_utf8(char32_t character, std::string& text) {
  const auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (character < 0x80) return put(character);
  if (character < 0x800) {
    put(0xC0 | character >> 6);
  } else {
    if (character < 0x10000) {
      put(0xE0 | character >> 12);
    } else {
      put(0xF0 | character >> 18);
      put(0x80 | (character >> 12 & 0x3F));
    }
    put(0x80 | (character >> 6 & 0x3F));
  }
  put(0x80 | (character & 0x3F));
}

std::string_view without_python_space_behind(std::string_view text) {
  while (!text.empty() && is_python_space(last_character(text))) text.remove_suffix(last_length(text));
  return text;
}

bool is_space(char32_t character) {
  return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0;
}

namespace {

bool is_late(UChar32 character, int last = 8) {
  UVersionInfo age;
  u_charAge(character, age);
  return age[0] > last;
}

}  // namespace

bool is_nonspacing_mark(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  // Characters that were of another category, or are today.
  if (c == 0x1734) return true;
  if (c == 0x1885 || c == 0x1886 || c == 0xA9BD || c == 0x111C9) return false;
  return u_charType(c) == U_NON_SPACING_MARK && !is_late(c);
}

bool is_mark(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  // Characters that were of another category, or are today.
  if (c == 0x1CF2 || c == 0x1CF3) return true;
  return (U_GET_GC_MASK(c) & U_GC_M_MASK) != 0 && c != 0x111C9 && !is_late(c, 9);
}

bool is_control(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  constexpr std::uint32_t categories = U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK | U_GC_CS_MASK;
  return (U_GET_GC_MASK(c) & categories) != 0 && !is_late(c);
}

std::string without_late_punctuation() {
  static const std::string expression = [] {
    std::string out = "(?![";
    for (UChar32 c = 0; c <= UCHAR_MAX_VALUE; ++c)
      if ((U_GET_GC_MASK(c) & U_GC_P_MASK) != 0 && is_late(c)) append_utf8(static_cast<char32_t>(c), out);
    return out + "])";
  }();
  return expression;
}

bool is_word(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  constexpr std::uint32_t categories = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) || (U_GET_GC_MASK(c) & categories) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL);
}

void append_lower(char32_t character, std::string& text) {
  if (character == 0x130) {
    text += "i\xcc\x87";
  } else {
    append_utf8(static_cast<char32_t>(u_tolower(static_cast<UChar32>(character))), text);
  }
}

void append_upper(char32_t character, std::string& text) {
  UChar from[2] = {}, to[8] = {};
  int32_t units = 0;
  UBool failed = false;
  U16_APPEND(from, units, 2, static_cast<UChar32>(character), failed);
  UErrorCode error = U_ZERO_ERROR;
  const int32_t size = failed ? 0 : u_strToUpper(to, 8, from, units, "", &error);
  if (failed || U_FAILURE(error)) return append_utf8(character, text);
  for (int32_t at = 0; at < size;) {
    UChar32 upper = 0;
    U16_NEXT(to, at, size, upper);
    append_utf8(static_cast<char32_t>(upper), text);
  }
}

char32_t written_byte(unsigned char byte) {
  return byte_alphabet.written[byte];
}

std::string_view written_bytes(std::string_view text, std::string& storage) {
  storage.clear();
  for (const char byte : text) append_utf8(written_byte(static_cast<unsigned char>(byte)), storage);
  return storage;
}

int byte_written(char32_t character) {
  return character < byte_alphabet.bytes.size() ? byte_alphabet.bytes[character] : -1;
}

}  // namespace sherd::data
