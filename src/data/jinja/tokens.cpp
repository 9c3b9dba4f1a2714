#include "data/jinja/tokens.h"

#include <algorithm>

#include "base/error.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data::jinja {
namespace {

using Kind = Token::Kind;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool begins_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
      text_ += text[i] == '\r' ? '\n' : text[i];
    }
    if (text_.ends_with('\n')) text_.pop_back();  // as Jinja does
  }

  std::vector<Token> cut() {
    while (at_ < text_.size()) cut_next();
    add(Kind::end, "");
    return std::move(out_);
  }

 private:
  [[noreturn]] void wrong(const std::string& what, int line) const {
    throw Error(ErrorKind::data, cat("line ", line, ": ", what));
  }
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  void add(Kind kind, std::string text) { out_.push_back({kind, std::move(text), line_}); }
  void skip(std::size_t count) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         text_.begin() + static_cast<std::ptrdiff_t>(at_ + count), '\n'));
    at_ += count;
  }

  /// A text up to the next of "{{", "{%" and "{#", and what that begins.
  void cut_next() {
    std::size_t begin = at_;
    for (; begin < text_.size(); ++begin)
      if (text_[begin] == '{' && begin + 1 < text_.size() &&
          std::string_view("{%#").find(text_[begin + 1]) != std::string_view::npos)
        break;
    std::string text = text_.substr(at_, begin - at_);
    const bool more = begin < text_.size();
    const char kind = more ? text_[begin + 1] : ' ', mark = begin + 2 < text_.size() ? text_[begin + 2] : ' ';
    if (more && mark == '-') {
      while (!text.empty() && is_space(text.back())) text.pop_back();
    } else if (more && kind != '{' && mark != '+') {
      std::size_t last = text.size();
      while (last > 0 && (text[last - 1] == ' ' || text[last - 1] == '\t')) --last;
      const bool begins_line = last > 0 ? text[last - 1] == '\n' : at_ == 0 || text_[at_ - 1] == '\n';
      if (begins_line) text.resize(last);
    }
    if (!text.empty()) add(Kind::text, std::move(text));
    skip(begin - at_);
    if (!more) return;
    if (kind == '#') return comment();
    if (kind == '%' && raw()) return;
    add(kind == '{' ? Kind::begin_print : Kind::begin_block, "");
    skip(2);
    if (rest().starts_with('-') || (kind == '%' && rest().starts_with('+'))) skip(1);
    inside(kind == '{');
  }

  /// Behind what ends a block, or with `trims` any: white space that goes with it.
  void skip_behind(bool trims, bool is_block) {
    if (trims)
      while (at_ < text_.size() && is_space(text_[at_])) skip(1);
    else if (is_block && rest().starts_with('\n'))
      skip(1);
  }

  void comment() {
    const std::size_t end = text_.find("#}", at_ + 2);
    if (end == std::string::npos) wrong("the comment that begins here has no end", line_);
    const char mark = text_[end - 1];
    skip(end + 2 - at_);
    skip_behind(mark == '-', mark != '+');
  }

  /// {% raw %}…{% endraw %}, which is text.
  bool raw() {
    const auto tag = [&](std::size_t at, std::string_view word) -> std::size_t {  // behind it; 0: it is none
      if (std::string_view(text_).substr(at, 2) != "{%") return 0;
      at += 2;
      if (at < text_.size() && (text_[at] == '-' || text_[at] == '+')) ++at;
      while (at < text_.size() && is_space(text_[at])) ++at;
      if (std::string_view(text_).substr(at, word.size()) != word) return 0;
      at += word.size();
      while (at < text_.size() && is_space(text_[at])) ++at;
      if (at < text_.size() && (text_[at] == '-' || text_[at] == '+')) ++at;
      return std::string_view(text_).substr(at, 2) == "%}" ? at + 2 : 0;
    };
    const std::size_t behind = tag(at_, "raw");
    if (behind == 0) return false;
    const int line = line_;
    const bool trims = text_[behind - 3] == '-';
    skip(behind - at_);
    skip_behind(trims, true);
    for (std::size_t end = at_; end < text_.size(); ++end)
      if (const std::size_t last = tag(end, "endraw")) {
        std::string text = text_.substr(at_, end - at_);
        if (text_[end + 2] == '-')
          while (!text.empty() && is_space(text.back())) text.pop_back();
        add(Kind::text, std::move(text));
        const bool trims_behind = text_[last - 3] == '-';
        skip(last - at_);
        skip_behind(trims_behind, true);
        return true;
      }
    wrong("the raw block that begins here has no endraw", line);
  }

  void inside(bool prints) {
    const int line = line_;
    const std::string_view end = prints ? "}}" : "%}";
    int braces = 0;
    for (;;) {
      while (at_ < text_.size() && is_space(text_[at_])) skip(1);
      if (at_ >= text_.size())
        wrong(cat("what begins here with '", prints ? "{{" : "{%", "' has no end '", end, "'"), line);
      const bool trims = rest().starts_with('-') && rest().substr(1).starts_with(end),
                 keeps = rest().starts_with('+') && rest().substr(1).starts_with(end);
      if (braces == 0 && (trims || keeps || rest().starts_with(end))) {
        add(prints ? Kind::end_print : Kind::end_block, "");
        skip(trims || keeps ? 3 : 2);
        return skip_behind(trims, !prints && !keeps);
      }
      if (rest().front() == '{') ++braces;
      if (rest().front() == '}') --braces;
      token();
    }
  }

  void token() {
    const char c = rest().front();
    if (begins_name(c)) {
      std::size_t size = 0;
      while (size < rest().size() && (begins_name(rest()[size]) || is_digit(rest()[size]))) ++size;
      return take(Kind::name, size);
    }
    if (is_digit(c)) return number();
    if (c == '"' || c == '\'') return string();
    for (const std::string_view sign : {"**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<",
                                        ">",  "=",  "(",  ")",  "[",  "]",  "{", "}", ",", ".", ":", "|"})
      if (rest().starts_with(sign)) return take(Kind::sign, sign.size());
    wrong(cat("'", c, "' is no part of an expression"), line_);
  }
  void take(Kind kind, std::size_t size) {
    add(kind, std::string(rest().substr(0, size)));
    skip(size);
  }

  void number() {
    std::size_t size = 0;
    const auto digits = [&] {
      while (size < rest().size() && (is_digit(rest()[size]) || rest()[size] == '_')) ++size;
    };
    digits();
    bool real = false;
    if (size + 1 < rest().size() && rest()[size] == '.' && is_digit(rest()[size + 1])) {
      real = true, ++size;
      digits();
    }
    if (size < rest().size() && (rest()[size] == 'e' || rest()[size] == 'E')) {
      const std::size_t sign =
          size + 1 < rest().size() && (rest()[size + 1] == '-' || rest()[size + 1] == '+');
      if (size + 1 + sign < rest().size() && is_digit(rest()[size + 1 + sign])) {
        real = true, size += 1 + sign;
        digits();
      }
    }
    take(real ? Kind::real : Kind::integer, size);
    std::erase(out_.back().text, '_');
  }

  void string() {
    const int line = line_;
    const char quote = rest().front();
    std::string out;
    std::size_t size = 1;
    for (;; ++size) {
      if (size >= rest().size()) wrong("the string that begins here has no end", line);
      const char c = rest()[size];
      if (c == quote) break;
      if (c != '\\' || size + 1 >= rest().size()) {
        out += c;
        continue;
      }
      const char escaped = rest()[++size];
      constexpr std::string_view names = "nrtabfv0", meanings{"\n\r\t\a\b\f\v\0", 8};
      if (const std::size_t at = names.find(escaped); at != std::string_view::npos) {
        out += meanings[at];
      } else if (escaped == 'x' || escaped == 'u' || escaped == 'U') {
        const std::size_t digits = escaped == 'x' ? 2 : escaped == 'u' ? 4 : 8;
        char32_t code = 0;
        for (std::size_t i = 1; i <= digits; ++i) {
          const char digit = size + i < rest().size() ? rest()[size + i] : ' ';
          const std::size_t value = std::string_view("0123456789abcdefABCDEF").find(digit);
          if (value == std::string_view::npos) wrong("a character's number in a string is not whole", line);
          code = code * 16 + static_cast<char32_t>(value < 16 ? value : value - 6);
        }
        append_utf8(code, out);
        size += digits;
      } else if (escaped != '\n') {
        if (escaped != '\\' && escaped != '\'' && escaped != '"') out += '\\';
        out += escaped;
      }
    }
    add(Kind::string, std::move(out));
    skip(size + 1);
  }

  std::string text_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> out_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view text) {
  return Lexer(text).cut();
}

}  // namespace sherd::data::jinja
