#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/jinja/run.h"
#include "data/jinja/tokens.h"

namespace sherd::data::jinja {

/// The arguments of a call as they stand in a template.
struct CallSyntax {
  struct One {
    std::string name;  ///< empty: by position
    Expression value;
    int stars = 0;  ///< * or **: all of a list's, or a dictionary's
  };
  std::vector<One> all;

  Arguments evaluate(Run& run) const;
};

/// The list, or tuple, of what the items are.
Expression list_of(std::vector<Expression> items, bool tuple);

/// Makes functions of a template's expressions, whose tokens it goes through.
class ExpressionParser {
 protected:
  explicit ExpressionParser(std::string_view text) : tokens_(tokens_of(text)) {}

  using Kind = Token::Kind;
  [[noreturn]] void wrong(const std::string& what) const {
    throw Error(ErrorKind::data, cat("line ", here().line, ": ", what));
  }
  const Token& here() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  bool is(Kind kind, std::string_view text) const { return here().kind == kind && here().text == text; }
  bool is_sign(std::string_view text) const { return is(Kind::sign, text); }
  bool is_word(std::string_view text) const { return is(Kind::name, text); }
  bool take_sign(std::string_view text) { return is_sign(text) && (++at_, true); }
  bool take_word(std::string_view text) { return is_word(text) && (++at_, true); }
  std::string shown() const {
    switch (here().kind) {
      case Kind::end:
        return "the end of the template";
      case Kind::end_block:
        return "'%}'";
      case Kind::end_print:
        return "'}}'";
      case Kind::text:
        return "text";
      default:
        return cat("'", excerpt(here().text, 40), "'");
    }
  }
  void expect_sign(std::string_view text) {
    if (!take_sign(text)) wrong(cat("'", text, "' is missing before ", shown()));
  }
  void expect_word(std::string_view text) {
    if (!take_word(text)) wrong(cat("'", text, "' is missing before ", shown()));
  }
  void expect(Kind kind) {
    if (here().kind != kind) wrong(cat("the end of a block or expression is missing before ", shown()));
    ++at_;
  }
  std::string name() {
    if (here().kind != Kind::name) wrong(cat("a name is missing before ", shown()));
    return tokens_[at_++].text;
  }
  /// Parentheses and blocks within each other, each of which counts several times.
  static constexpr int most_nested = 500;
  /// Counts how deep the parser is; throws beyond what any template is.
  struct Deeper {
    explicit Deeper(ExpressionParser& parser) : at(parser.depth_) {
      if (++at > most_nested) parser.wrong("blocks or parentheses lie too deep within each other");
    }
    ~Deeper() { --at; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    int& at;
  };

  Expression expression();
  /// An expression without `if … else`.
  Expression either();
  Expression primary();
  CallSyntax call();
  Expression filtered(Expression of);

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;

 private:
  Expression both();
  Expression negation();
  std::string comparing();
  Expression comparison();
  template <class Next>
  Expression chain(std::initializer_list<const char*> signs, const Next& next);
  Expression sum();
  Expression joined();
  Expression product();
  Expression unary(bool filters);
  Expression parenthesis();
  Expression dictionary();
  Expression called(Expression of, std::string what);
  Expression subscript(Expression of);
  Expression behind(Expression of);
  Expression tested(Expression of);
};

}  // namespace sherd::data::jinja
