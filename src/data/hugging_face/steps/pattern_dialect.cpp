// Oniguruma's expressions in PCRE2's words.
#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/pattern.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

constexpr std::string_view space_set =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view other_than_space_set =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
constexpr std::string_view word_set = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
/// Oniguruma's \w also matches these where it stands alone: superscripts and fractions of Latin-1, by a table
/// of its own.
constexpr std::string_view more_of_a_lone_word = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";

constexpr std::array categories{"C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",
                                "Mc", "Me", "Mn", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi",
                                "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};
constexpr std::array scripts{"Arabic",   "Armenian", "Bengali",   "Bopomofo",  "Cyrillic", "Devanagari",
                             "Ethiopic", "Georgian", "Greek",     "Gujarati",  "Gurmukhi", "Han",
                             "Hangul",   "Hebrew",   "Hiragana",  "Kannada",   "Katakana", "Khmer",
                             "Lao",      "Latin",    "Malayalam", "Mongolian", "Myanmar",  "Oriya",
                             "Sinhala",  "Tamil",    "Telugu",    "Thai",      "Tibetan"};

template <class Names>
bool is_among(const Names& names, std::string_view name) {
  return std::any_of(names.begin(), names.end(), [&](const char* other) { return name == other; });
}

class Translator {
 public:
  explicit Translator(const std::string& expression) : in_(expression) {}

  std::string translate() {
    while (at_ < in_.size()) item();
    if (!groups_.empty()) refuse("a group that does not end");
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail(ErrorKind::data, "the expression '", excerpt(in_, 300), "' has ", what, " at byte ", at_,
         ", which is not translated for PCRE2; prepare the text with the package that made the file");
  }

  bool next_is(std::string_view text) const { return in_.compare(at_, text.size(), text) == 0; }
  bool take(std::string_view text) {
    if (!next_is(text)) return false;
    at_ += text.size();
    return true;
  }
  char32_t character() {
    const std::string_view rest = std::string_view(in_).substr(at_);
    if (rest.empty()) refuse("an end in the middle");
    const std::size_t length = utf8_length(rest);
    if (length == 0) refuse("bytes that are no UTF-8");
    at_ += length;
    return first_character(rest);
  }

  void emit(char32_t c) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (; c > 0 || hex.empty(); c >>= 4) hex.insert(hex.begin(), digits[c & 15]);
    out_ += "\\x{" + hex + "}";
  }
  void begin_atom() { atom_ = out_.size(); }

  void item() {
    const char c = in_[at_];
    if (c == '(') return open_group();
    if (c == ')') return close_group();
    if (c == '*' || c == '+' || c == '?') return quantifier();
    if (c == '{' && interval()) return;
    if (c == '|') {
      out_ += in_[at_++];
      atom_.reset();
      return;
    }
    begin_atom();
    if (c == '[') return set(false);
    if (c == '\\') return escape_outside();
    if (c == '.' || c == '^' || c == '$')
      out_ += in_[at_++];
    else
      emit(character());
  }

  void open_group() {
    groups_.push_back(out_.size());
    atom_.reset();
    for (const std::string_view kind : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"})
      if (take(kind)) {
        out_ += kind;
        return;
      }
    if (next_is("(?")) refuse(cat("a group '", in_.substr(at_, 4), "'"));
    ++at_;
    out_ += "(?:";  // nobody asks what it captured
  }

  void close_group() {
    if (groups_.empty()) refuse("a ')' without '('");
    atom_ = groups_.back();
    groups_.pop_back();
    out_ += in_[at_++];
  }

  void end_quantifier() {
    atom_.reset();
    if (at_ < in_.size() && (in_[at_] == '*' || in_[at_] == '+' || in_[at_] == '?'))
      refuse("a quantifier of a quantifier");
  }

  void quantifier() {
    if (!atom_) refuse("a quantifier of nothing");
    out_ += in_[at_++];
    if (at_ < in_.size() && (in_[at_] == '+' || in_[at_] == '?')) out_ += in_[at_++];
    end_quantifier();
  }

  std::string number() {
    std::string digits;
    while (at_ < in_.size() && in_[at_] >= '0' && in_[at_] <= '9') digits += in_[at_++];
    return digits;
  }

  /// False where the brace is a character.
  bool interval() {
    const std::size_t before = at_++;
    const std::string least = number();
    const bool range = take(",");
    const std::string most = range ? number() : least;
    if (!take("}") || (least.empty() && most.empty())) {
      at_ = before;
      return false;
    }
    if (!atom_) refuse("a quantifier of nothing");
    out_ += cat("{", least.empty() ? "0" : least, range ? "," : "", range ? most : "", "}");
    if (next_is("?")) {
      if (!range) refuse("a '{n}?'");
      ++at_;
      out_ += "?";
    } else if (take("+")) {  // not possessive here, as it would be in PCRE2
      out_.insert(*atom_, "(?:");
      out_ += ")+";
    }
    end_quantifier();
    return true;
  }

  std::optional<char32_t> hexadecimal(std::size_t digits) {
    char32_t value = 0;
    std::size_t read = 0;
    for (; read < digits && at_ < in_.size(); ++read, ++at_) {
      const char c = in_[at_];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) break;
      value = value * 16 + static_cast<char32_t>(digit);
    }
    return read == 0 ? std::nullopt : std::optional(value);
  }

  /// The character that an escape stands for; none, and nothing read, where it is of another kind.
  std::optional<char32_t> escaped_character() {
    const std::size_t before = at_++;
    if (at_ >= in_.size()) refuse("a '\\' at the end");
    static constexpr std::string_view names = "tnrfvae", values = "\t\n\r\f\v\a\x1b";
    if (const std::size_t found = names.find(in_[at_]); found != std::string_view::npos) {
      ++at_;
      return static_cast<char32_t>(values[found]);
    }
    std::optional<char32_t> value;
    if (take("x{")) {
      value = hexadecimal(6);
      if (!value || *value > 0x10FFFF || !take("}")) refuse("a bad '\\x{…}'");
      return value;
    }
    if (take("x") || take("u")) {
      const bool byte = in_[at_ - 1] == 'x';
      value = hexadecimal(byte ? 2 : 4);
      if (!value || (byte && *value > 0x7F)) refuse("a bad '\\x'");
      return value;
    }
    const char c = in_[at_];
    if (static_cast<unsigned char>(c) < 0x80 && ((c | 0x20) < 'a' || (c | 0x20) > 'z') &&
        (c < '0' || c > '9')) {
      ++at_;
      return static_cast<char32_t>(c);
    }
    at_ = before;
    return std::nullopt;
  }

  void property() {
    bool negated = in_[at_ - 1] == 'P';
    if (!take("{")) refuse("a property without braces");
    if (take("^")) negated = !negated;
    const std::size_t end = in_.find('}', at_);
    if (end == std::string::npos) refuse("a property without its end");
    const std::string name = in_.substr(at_, end - at_);
    const bool script = is_among(scripts, name);
    if (!script && !is_among(categories, name)) refuse(cat("the property '", excerpt(name), "'"));
    at_ = end + 1;
    out_ += cat(negated ? "\\P{" : "\\p{", script ? "sc:" : "", name, "}");
  }

  /// A set that an escape stands for, as it is written inside of brackets. False, and nothing read: another.
  bool escaped_set() {
    const auto put = [&](std::string_view set) {
      out_ += set;
      return true;
    };
    if (take("\\s")) return put(space_set);
    if (take("\\S")) return put(other_than_space_set);
    if (take("\\d")) return put("\\p{Nd}");
    if (take("\\D")) return put("\\P{Nd}");
    if (take("\\w")) return put(word_set);
    if (take("\\h")) return put("0-9A-Fa-f");
    if (!take("\\p") && !take("\\P")) return false;
    property();
    return true;
  }

  void escape_outside() {
    for (const std::string_view same : {"\\A", "\\z", "\\Z"})
      if (take(same)) {
        out_ += same;
        return;
      }
    if (const std::optional<char32_t> c = escaped_character()) return emit(*c);
    for (const auto& [escape, open] : {std::pair{"\\w", "["}, std::pair{"\\W", "[^"}})
      if (take(escape)) {
        out_ += cat(open, word_set, more_of_a_lone_word, "]");
        return;
      }
    out_ += "[";
    if (!escaped_set()) refuse(cat("'", in_.substr(at_, 2), "'"));
    out_ += "]";
  }

  /// One character of a set; none: a set was emitted, or joined.
  std::optional<char32_t> member() {
    if (next_is("[:")) refuse("a POSIX bracket");
    if (next_is("&&")) refuse("an intersection");
    if (next_is("[")) {
      set(true);
      return std::nullopt;
    }
    if (!next_is("\\")) return character();
    if (const std::optional<char32_t> c = escaped_character()) return c;
    if (!escaped_set()) refuse(cat("'", in_.substr(at_, 2), "' in a set"));
    return std::nullopt;
  }

  void set(bool nested) {
    ++at_;
    const bool negated = take("^");
    if (nested && negated) refuse("a negated set in a set");
    if (!nested) out_ += negated ? "[^" : "[";
    for (bool first = true; first || !next_is("]"); first = false) {
      if (at_ >= in_.size()) refuse("a set without its end");
      const std::optional<char32_t> low = member();
      if (!low) continue;
      emit(*low);
      if (!next_is("-") || in_.compare(at_, 2, "-]") == 0 || in_.compare(at_, 2, "-[") == 0) continue;
      ++at_;
      const std::optional<char32_t> high = member();
      if (!high) refuse("a range that ends with a set");
      out_ += "-";
      emit(*high);
    }
    ++at_;
    if (!nested) out_ += "]";
  }

  const std::string& in_;
  std::string out_;
  std::size_t at_ = 0;
  std::optional<std::size_t> atom_;  // where in out_ what a quantifier would repeat begins
  std::vector<std::size_t> groups_;
};

}  // namespace

std::string to_pcre(const std::string& expression) {
  return Translator(expression).translate();
}

}  // namespace sherd::data
