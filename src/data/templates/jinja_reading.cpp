#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "data/templates/published_template.h"

namespace sherd::data {
namespace {

constexpr int most_parentheses = 32;  // within each other, of any template that people write

std::string_view without_blanks(std::string_view text) {
  constexpr std::string_view spaces = " \t\n\r\f\v\x1c";
  const std::size_t first = text.find_first_not_of(spaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(spaces) + 1 - first);
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/// The names that are known at a place of a template.
struct TemplateNames {
  std::map<std::string, std::string> texts;  ///< the text that a name writes, by names that were set
  std::set<std::string> read;                ///< names that were read
  std::vector<std::string> begins;           ///< tokens that begin documents, as texts

  /// A text of the template's own.
  std::string literal(std::string text) const {
    for (const std::string& token : begins)
      for (std::size_t at; (at = text.find(token)) != std::string::npos;)
        text.replace(at, token.size(), texts.at("bos_token"));
    return text;
  }
};

/// Reads an expression for what it writes: texts, roles and contents joined by + or ~. All else is unknown.
class Expression {
 public:
  Expression(std::string_view text, TemplateNames& names, int depth = 0)
      : rest_(text), names_(names), depth_(depth) {}

  std::string written() {
    std::string out = term();
    for (skip_spaces(); !rest_.empty(); skip_spaces()) {
      if (rest_.front() != '+' && rest_.front() != '~') return std::string(unknown_mark);
      rest_.remove_prefix(1);
      out += term();
    }
    return out;
  }

 private:
  void skip_spaces() {
    const std::size_t first = rest_.find_first_not_of(" \t\n\r");
    rest_.remove_prefix(std::min(first, rest_.size()));
  }
  bool take(char c) {
    skip_spaces();
    if (!rest_.starts_with(c)) return false;
    rest_.remove_prefix(1);
    return true;
  }
  std::string name() {
    skip_spaces();
    std::size_t size = 0;
    while (size < rest_.size() && is_letter(rest_[size])) ++size;
    const std::string out(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return out;
  }
  /// Up to the quote that ends it.
  std::string string() {
    const char quote = rest_.front();
    std::string out;
    std::size_t at = 1;
    for (; at < rest_.size() && rest_[at] != quote; ++at) {
      if (rest_[at] == '\\' && at + 1 < rest_.size()) {
        const char c = rest_[++at];
        out += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
      } else {
        out += rest_[at];
      }
    }
    rest_.remove_prefix(std::min(at + 1, rest_.size()));
    return out;
  }
  /// The text in brackets, without reading it.
  std::string inside(char open, char close) {
    std::size_t depth = 1, at = 0;
    for (; at < rest_.size(); ++at) {
      if (rest_[at] == open) ++depth;
      if (rest_[at] == close && --depth == 0) break;
    }
    const std::string out(without_blanks(rest_.substr(0, at)));
    rest_.remove_prefix(std::min(at + 1, rest_.size()));
    return out;
  }

  std::string term() {
    skip_spaces();
    std::string value(unknown_mark), path;
    if (rest_.starts_with('\'') || rest_.starts_with('"')) {
      value = names_.literal(string());
    } else if (take('(')) {
      const std::string within = inside('(', ')');
      if (depth_ < most_parentheses) value = Expression(within, names_, depth_ + 1).written();
    } else {
      path = name();
      value = of_name(path);
      if (path == "raise_exception" && take('(')) return inside('(', ')'), std::string();
    }
    for (;;) {
      if (take('[')) {
        const std::string key = inside('[', ']');
        const bool quoted = key.size() > 2 && (key.front() == '\'' || key.front() == '"');
        value = of_key(quoted ? key.substr(1, key.size() - 2) : "");
      } else if (take('.')) {
        const std::string key = name();
        const bool called = take('(');
        if (called)
          value = inside('(', ')').empty() && key == "strip" ? std::string(without_blanks(value))
                                                             : std::string(unknown_mark);
        else
          value = names_.texts.contains(cat(path, '.', key)) ? of_name(cat(path, '.', key)) : of_key(key);
      } else if (take('|')) {
        const bool trims = name() == "trim", plain = !take('(') || inside('(', ')').empty();
        value = trims && plain ? std::string(without_blanks(value)) : std::string(unknown_mark);
      } else if (take('(')) {
        inside('(', ')'), value = unknown_mark;
      } else {
        return value;
      }
    }
  }

  std::string of_name(const std::string& name) {
    const auto found = names_.texts.find(name);
    if (found == names_.texts.end()) return std::string(unknown_mark);
    names_.read.insert(name);
    return found->second;
  }
  static std::string of_key(const std::string& key) {
    return std::string(key == "content" ? content_mark : key == "role" ? role_mark : unknown_mark);
  }

  std::string_view rest_;
  TemplateNames& names_;
  int depth_;
};

/// Reads a template from its first to its last line, and writes it with marks for what messages say.
class Reading {
 public:
  Reading(std::string_view jinja, const Tokenizer& tokenizer) {
    for (const char c : jinja)
      if (c != '\r') text_ += c;
    if (text_.ends_with('\n')) text_.pop_back();  // as jinja does
    rest_ = text_;
    names_.begins = begin_tokens(tokenizer);
    names_.texts = {{"bos_token", std::string(begin_mark)},
                    {"eos_token", tokenizer.token(tokenizer.end_of_document())}};
    while (!rest_.empty()) read_next();
  }
  Reading(const Reading&) = delete;  // rest_ lies in text_
  Reading& operator=(const Reading&) = delete;
  const std::string& written() const { return out_; }

 private:
  void read_next() {
    std::size_t open = 0;  // where the next tag begins
    const auto is_tag = [&] {
      return rest_[open] == '{' && std::string_view("{%#").find(rest_[open + 1]) != std::string_view::npos;
    };
    while (open + 1 < rest_.size() && !is_tag()) ++open;
    if (open + 1 >= rest_.size()) {
      write_text(rest_, false, '{');
      rest_ = {};
      return;
    }
    const char kind = rest_[open + 1];
    const std::size_t close = end_of_tag(open + 2, kind);
    std::string_view inner = rest_.substr(open + 2, close - open - 2);
    const auto take = [&](bool front) {
      const bool has = !inner.empty() && (front ? inner.front() : inner.back()) == '-';
      if (has) front ? inner.remove_prefix(1) : inner.remove_suffix(1);
      return has;
    };
    const bool before = take(true), behind = take(false);
    write_text(rest_.substr(0, open), before, kind);
    rest_.remove_prefix(std::min(close + 2, rest_.size()));
    if (kind == '{') out_ += Expression(without_blanks(inner), names_).written();
    if (kind == '%') read_statement(without_blanks(inner));
    trim_next_ = behind, line_end_goes_ = kind != '{', line_begins_ = false;
  }

  /// Where the tag's last two characters are; within quotes none are.
  std::size_t end_of_tag(std::size_t at, char kind) const {
    const char last = kind == '{' ? '}' : kind;
    char quote = 0;
    for (; at + 1 < rest_.size(); ++at) {
      const char c = rest_[at];
      if (kind != '#' && quote != 0) {
        if (c == '\\') ++at;
        if (c == quote) quote = 0;
      } else if (kind != '#' && (c == '\'' || c == '"')) {
        quote = c;
      } else if (c == last && rest_[at + 1] == '}') {
        return at;
      }
    }
    return rest_.size();
  }

  /// Text between tags, as transformers sets jinja up: trim_blocks and lstrip_blocks.
  void write_text(std::string_view text, bool trim_end, char next) {
    if (line_end_goes_ && text.starts_with('\n')) {
      text.remove_prefix(1);
      line_begins_ = true;
    }
    if (trim_next_) text.remove_prefix(std::min(text.find_first_not_of(" \t\n\r"), text.size()));
    if (next != '{') {
      const std::size_t last = text.find_last_not_of(" \t");
      const std::size_t end = last == std::string_view::npos ? 0 : last + 1;
      if (end > 0 ? text[end - 1] == '\n' : line_begins_) text = text.substr(0, end);
    }
    if (trim_end) {
      const std::size_t last = text.find_last_not_of(" \t\n\r");
      text = text.substr(0, last == std::string_view::npos ? 0 : last + 1);
    }
    out_ += names_.literal(std::string(text));
  }

  /// A document's beginning is written in front of all messages, or with the first.
  void mark_begin() {
    const auto first = [](const std::string& condition) {
      for (const char* part : {"loop.first", "loop.index0 == 0", "loop.index == 1"})
        if (condition.find(part) != std::string::npos && condition.find("not ") == std::string::npos)
          return true;
      return false;
    };
    const bool in_loop = std::find(open_.begin(), open_.end(), "for") != open_.end();
    names_.texts["bos_token"] =
        !in_loop || std::any_of(open_.begin(), open_.end(), first) ? begin_mark : unknown_mark;
  }

  void read_statement(std::string_view text) {
    const auto is = [&](std::string_view word) {
      return text.starts_with(word) && (text.size() == word.size() || !is_letter(text[word.size()]));
    };
    for (const char* word : {"generation", "endgeneration", "break", "continue"})
      if (is(word)) return;
    if (is("if") || is("for")) open_.emplace_back(is("if") ? text : "for");
    if ((is("elif") || is("else")) && !open_.empty()) open_.back() = text;
    if ((is("endif") || is("endfor")) && !open_.empty()) open_.pop_back();
    for (const char* word : {"if", "elif", "else", "endif", "for", "endfor"})
      if (is(word)) return mark_begin();
    const std::size_t equals = text.find('=');
    if (!is("set") || equals == std::string_view::npos) {
      out_ += unknown_mark;
      return;
    }
    const std::string value = Expression(without_blanks(text.substr(equals + 1)), names_).written();
    const std::string name(without_blanks(text.substr(3, equals - 3)));
    const auto [at, added] = names_.texts.emplace(name, value);
    std::string& known = at->second;
    if (added || known == value) return;
    if (value == cat(begin_mark, known)) {  // with the first message
      known = value;
      return;
    }
    // A loop comes back to where it was read before.
    if (names_.read.contains(name) && known != cat(begin_mark, value)) out_ += unknown_mark;
    // Set twice to two texts, as the two branches of a condition do, it may be either.
    if (!value.empty()) known = known.empty() ? value : std::string(unknown_mark);
  }

  std::string text_, out_;
  std::string_view rest_;
  TemplateNames names_;
  std::vector<std::string> open_;  ///< conditions and loops around the place
  bool trim_next_ = false, line_end_goes_ = false, line_begins_ = true;
};

}  // namespace

std::vector<std::string> begin_tokens(const Tokenizer& tokenizer) {
  std::vector<std::string> out{"<|begin_of_text|>", "<s>"};
  if (const auto id = tokenizer.begin_of_document()) out.push_back(tokenizer.token(*id));
  const std::string end = tokenizer.token(tokenizer.end_of_document());
  std::erase_if(out, [&](const std::string& token) { return token.empty() || token == end; });
  return out;
}

std::string written_by(std::string_view jinja, const Tokenizer& tokenizer) {
  return Reading(jinja, tokenizer).written();
}

}  // namespace sherd::data
