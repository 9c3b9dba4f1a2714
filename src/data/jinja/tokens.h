#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::data::jinja {

/// A part of a template.
struct Token {
  enum class Kind : std::uint8_t {
    text,         ///< written as it is
    begin_print,  ///< {{
    end_print,    ///< }}
    begin_block,  ///< {%
    end_block,    ///< %}
    name,         ///< also words such as "for" and "and"
    integer,
    real,
    string,  ///< without its quotes
    sign,    ///< "+", "==", "(", …
    end
  };
  Kind kind;
  std::string text;
  int line;
};

/// Cuts a template; the last token is `end`. Blocks and comments take the white space in front of them on
/// their line, and the end of the line behind them; "-" within takes all white space on its side, "+" none
/// (Jinja's lstrip_blocks and trim_blocks). Throws Error{data} with the line.
std::vector<Token> tokens_of(std::string_view text);

}  // namespace sherd::data::jinja
