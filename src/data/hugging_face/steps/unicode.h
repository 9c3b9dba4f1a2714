#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sherd::data {

/// `text` as valid UTF-8: itself, or in `storage` with U+FFFD for each longest beginning of a sequence that
/// is cut off, and for each other byte that belongs to none (as Python decodes with errors="replace").
std::string_view valid_utf8(std::string_view text, std::string& storage);

/// The character at the front of valid UTF-8 that is not empty.
char32_t first_character(std::string_view text);
/// The bytes of the character at its end, and that character.
std::size_t last_length(std::string_view text);
char32_t last_character(std::string_view text);

void append_utf8(char32_t character, std::string& text);

/// White_Space.
bool is_space(char32_t character);
/// The characters that Python's str.strip() takes away and its `\s` matches: White_Space and U+001C to
/// U+001F.
inline bool is_python_space(char32_t character) {
  return (character >= 0x1C && character <= 0x1F) || is_space(character);
}
/// Python's text.rstrip(), of valid UTF-8.
std::string_view without_python_space_behind(std::string_view text);
/// The characters of `\w`: Alphabetic, M, Nd, Pc and Join_Control (Unicode Technical Standard 18, annex C).
bool is_word(char32_t character);
// Categories of characters as the tokenizers package has them, by a table of Unicode 8, without later ones.
/// Mn.
bool is_nonspacing_mark(char32_t character);
/// M, by another table, of Unicode 9.
bool is_mark(char32_t character);
/// Cc, Cf, Co and Cs.
bool is_control(char32_t character);
/// An expression to stand in front of one for P, which keeps out what came after Unicode 8.
std::string without_late_punctuation();
/// Appends one character in lower case; U+0130 alone becomes two.
void append_lower(char32_t character, std::string& text);
/// Appends one character in upper case, which may be several characters.
void append_upper(char32_t character, std::string& text);

/// The character by which byte-level vocabularies write a byte: itself where it is printable in Latin-1,
/// else U+0100 and up (GPT-2's bytes_to_unicode).
char32_t written_byte(unsigned char byte);
/// All of a text so, in `storage`.
std::string_view written_bytes(std::string_view text, std::string& storage);
/// The byte that it stands for; -1: none.
int byte_written(char32_t character);

}  // namespace sherd::data
