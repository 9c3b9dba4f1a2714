#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "data/jinja/value.h"

// The language of chat templates: Jinja, as transformers runs it (apply_chat_template(): blocks take a line
// for themselves, loops know break and continue, {% generation %} marks answers, tojson writes what
// json.dumps does). A template has texts, {{ expressions }}, {# comments #}, and the statements for, if, set,
// macro, call, filter, with, raw, break, continue and generation. What it cannot do is an error that names
// it, with its line, when it is read, or for filters, tests and methods when it runs: import, include and
// inheritance.
//
//   value.h      its values, with Python's meaning
//   tokens.h     a template cut into texts, names, numbers and signs
//   expression_parser.h, parser.cpp   which become functions to run, in run.h's scopes
//   operations.h what signs do
//   builtins.h   filters (filters.cpp), tests, methods (of texts: texts.h), and functions that are there
namespace sherd::data::jinja {

class Scope;
struct Run;

/// Where a template goes on behind a statement: with the next one, with the loop's next turn, or behind the
/// loop.
enum class Flow : std::uint8_t { next, end_of_turn, end_of_loop };
using Statement = std::function<Flow(Run&)>;

/// Part of a text that {% generation %} encloses, in bytes.
struct Generated {
  std::size_t begin, end;
};

/// A template that is ready to run. Copies are the same template, and may run in several threads.
class Template {
 public:
  /// Throws Error{data} naming the line of what is wrong, or unknown.
  explicit Template(std::string_view text);
  /// The text that it writes with these names. Throws Error{data} naming the line; of raise_exception() with
  /// its text. `generated`: gets the parts that {% generation %} encloses, or none where one of them stands
  /// in a text that the template keeps (set, filter, macro, call) and may write anywhere; may be null.
  std::string render(const Dict& names, std::vector<Generated>* generated = nullptr) const;
  /// Whether it has {% generation %}.
  bool marks_answers() const { return marks_answers_; }

 private:
  std::shared_ptr<const Statement> body_;
  bool marks_answers_ = false;
};

}  // namespace sherd::data::jinja
