#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "config/json_tree.h"

// The values that the parser reads, with their place, and what it gathers on its way. Internal to this room
// and to models/hub, which reads config.json.
namespace sherd::config {

inline constexpr std::int64_t int64_max = std::numeric_limits<std::int64_t>::max();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// The parser gathers this on its way.
struct Context {
  std::vector<std::string> notes;
  Problems problems;
  std::string advice = {};      ///< told of unknown keys; empty: known keys that are like them
  std::set<std::string> given;  ///< keys that have a value, perhaps by another key
  std::map<std::string, std::string> given_as;  ///< keys whose value another key alone gave, and that key
  void note(const std::string& path, const std::string& reason) { notes.push_back(path + ": " + reason); }
  /// Calls `read`; an Error{config} of it becomes a problem, so that the keys after it are read too.
  void attempt(const std::function<void()>& read);
  /// Throws Error{config} with all problems, if there are any, in words of the keys that were given.
  void raise();
};

/// The text with keys as they were given (Context::given_as).
std::string in_given_keys(std::string text, const std::map<std::string, std::string>& given_as);

/// Thrown by a section with problems when they are in the context, so that nothing is concluded from it.
struct Reported {};

/// Words that people write, case ignored, and the choice that they mean, where no spelling leads there.
using Synonyms = std::map<std::string, std::string>;

/// The dotted path of a key in a section.
inline std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// A value with its dotted path; converts with checks. Every conversion throws Error{config} with place and
/// path.
struct Value {
  const Node& node;
  std::string path;
  Context& context;

  template <class... Args>
  [[noreturn]] void error(const Args&... args) const {
    fail(ErrorKind::config, node.place.str(), ": ", path, ": ", args...);
  }
  void note(const std::string& reason) const { context.note(path, reason); }
  /// An entry of a list.
  Value item(std::size_t i) const { return {node.items[i], cat(path, "[", i, "]"), context}; }
  /// The value of a key of a section; where it is not there, the section itself by the key's path, for
  /// errors.
  Value at(const std::string& name) const {
    const Node* found = node.find(name);
    return {found ? *found : node, join(path, name), context};
  }
  void expect(Node::Kind kind) const;
  /// Booleans and numbers may stand in quotes, as DeepSpeed's own parser takes them in most sections; a note
  /// says so.
  bool boolean() const;
  /// Integral floats (1e9) count as integers.
  std::int64_t integer(std::int64_t min = std::numeric_limits<std::int64_t>::min(),
                       std::int64_t max = int64_max) const;
  /// Finite, in [min, max]; with `open_min`, above min.
  double real(double min = -infinity, double max = infinity, bool open_min = false) const;
  /// A number of bytes, or text that config::bytes_of() knows.
  std::uint64_t bytes() const;
  const std::string& text() const;
  /// The index of the string in `names`, case ignored; else an error with what `meant` has for it, or the
  /// nearest one where one is near.
  std::size_t choice(const std::vector<std::string>& names, const Synonyms& meant = {}) const;
};

/// The values that a key takes: in words, as errors and the page of keys say it, "integer from 0 to 3", and
/// as JSON Schema.
struct Takes {
  std::string words, schema;
};
Takes integers(std::int64_t min = std::numeric_limits<std::int64_t>::min(), std::int64_t max = int64_max);
Takes byte_sizes();
Takes reals(double min = -infinity, double max = infinity, bool open_min = false);
/// One of these words.
Takes words(const std::vector<std::string>& words);
/// A list of so many numbers; `words` say so.
Takes numbers(std::string words, std::size_t count, double min = -infinity, double max = infinity);

/// The value without its quotes where it is a string that holds a number, true or false; else itself.
Node unquoted(const Value& value);

/// Reads a list of `count` numbers; `form` describes it in errors: "two numbers such as [0.9, 0.999]".
std::vector<double> read_numbers(const Value& value, std::size_t count, const char* form,
                                 double min = -infinity, double max = infinity);

/// A value of Sherd's for which DeepSpeed has a key of its own.
struct SameValue {
  const char *own, *foreign, *what;
};

/// Sets what either key may give, in any order; both, where they agree.
template <class T>
void set(T& field, const SameValue& same, const T& asked, const Value& value) {
  const bool first = value.context.given.insert(same.own).second;
  if (!first)
    value.context.given_as.erase(same.own);
  else if (value.path != same.own)
    value.context.given_as[same.own] = value.path;
  if (!first && field != asked)
    value.error(same.own, " and ", same.foreign, " say the same, ", same.what, ", but are given as ", field,
                " and ", asked, "; keep one of them");
  field = asked;
}

/// Values that switch a feature off.
bool is_false(const Value& value);
bool is_empty(const Value& value);
std::function<bool(const Value&)> equals_number(double number);
bool never(const Value& value);

}  // namespace sherd::config
