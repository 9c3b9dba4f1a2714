#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace sherd::data {

/// A searching thread's own memory; one for all patterns.
class MatchSpace {
 public:
  MatchSpace();
  ~MatchSpace();
  MatchSpace(const MatchSpace&) = delete;
  MatchSpace& operator=(const MatchSpace&) = delete;

 private:
  friend class Pattern;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A regular expression as tokenizer.json has them, or a plain text that is looked for. Immutable; any number
/// of threads may search, each with a MatchSpace of its own.
class Pattern {
 public:
  /// An expression of Oniguruma's (its Ruby syntax), which PCRE2 compiles: to_pcre() translates. Throws
  /// Error{data} naming the expression and what of it is not supported.
  static std::shared_ptr<const Pattern> expression(const std::string& text);
  /// `text` itself, which is not empty.
  static std::shared_ptr<const Pattern> literal(const std::string& text);
  ~Pattern();

  /// The first match in `text`, valid UTF-8, at or behind `from`; false: none. Throws Error{data} where
  /// searching takes more memory or steps than it may.
  bool find(std::string_view text, std::size_t from, MatchSpace& space, std::size_t& begin,
            std::size_t& end) const;

  /// Calls on_match(begin, end) for the matches at or behind `from`, from left to right; no empty one right
  /// behind another.
  template <class F>
  void for_each(std::string_view text, MatchSpace& space, const F& on_match, std::size_t from = 0) const {
    std::size_t begin = 0, end = 0, last = std::string_view::npos;
    while (from <= text.size() && find(text, from, space, begin, end)) {
      from = end;
      if (begin == end && end == last) {
        do ++from;
        while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80);
        continue;
      }
      on_match(begin, end);
      last = end;
    }
  }

 private:
  struct Code;
  Pattern();
  std::string text_;
  std::unique_ptr<Code> code_;  // null: text_ is looked for
};

/// An expression in PCRE2's words. Oniguruma's `\s`, `\d`, `\w` are written out, as PCRE2's differ (U+180E,
/// marks); nested sets are joined, properties of scripts named as such, "{n,m}+" grouped. Throws Error{data}
/// for what is not translated: back references, `\b`, intersections, POSIX brackets, options other than
/// (?i:…), others.
std::string to_pcre(const std::string& expression);

}  // namespace sherd::data
