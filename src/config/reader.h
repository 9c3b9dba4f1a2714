#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "config/json_tree.h"
#include "config/keys.h"

// The machinery behind the tables of keys: a Table<T> says which keys an object may have and how each is read
// into a T. Internal to this room.
namespace sherd::config {

inline constexpr std::int64_t int64_max = std::numeric_limits<std::int64_t>::max();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// What the parser gathers on its way.
struct Context {
  std::vector<std::string> notes;
  Problems problems;
  std::string advice = {};      ///< on unknown keys; empty: what is like them
  std::set<std::string> given;  ///< keys that have a value, though another key may have said it
  std::map<std::string, std::string> given_as;  ///< of these, by the other key alone: that key
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
  void expect(Node::Kind kind) const;
  /// Booleans and numbers may stand in quotes, as DeepSpeed's own parser takes them in most sections; a note
  /// says so.
  bool boolean() const;
  /// Integral floats (1e9) count as integers.
  std::int64_t integer(std::int64_t min = std::numeric_limits<std::int64_t>::min(),
                       std::int64_t max = int64_max) const;
  /// Finite, in [min, max]; with `open_min`, above min.
  double real(double min = -infinity, double max = infinity, bool open_min = false) const;
  const std::string& text() const;
  /// The index of the string in `names`, case ignored; else an error with what `meant` has for it, or the
  /// nearest one where one is near.
  std::size_t choice(const std::vector<std::string>& names, const Synonyms& meant = {}) const;
};

/// What these take, as errors and the page of keys say it: "integer from 0 to 3", "number > 0".
std::string integers(std::int64_t min = std::numeric_limits<std::int64_t>::min(),
                     std::int64_t max = int64_max);
std::string reals(double min = -infinity, double max = infinity, bool open_min = false);

/// The value without its quotes where it is a string that holds a number, true or false; else itself.
Node unquoted(const Value& value);

/// A value for which DeepSpeed has a key of its own.
struct Twin {
  const char *own, *foreign, *what;
};

/// Sets what either key may give, in any order; both, where they agree.
template <class T>
void set(T& field, const Twin& twin, const T& asked, const Value& value) {
  const bool first = value.context.given.insert(twin.own).second;
  if (!first)
    value.context.given_as.erase(twin.own);
  else if (value.path != twin.own)
    value.context.given_as[twin.own] = value.path;
  if (!first && field != asked)
    value.error(twin.own, " and ", twin.foreign, " say the same, ", twin.what, ", but are given as ", field,
                " and ", asked, "; keep one of them");
  field = asked;
}

/// How a section treats the string "auto" (DeepSpeed leaves that to its callers).
enum class Auto : std::uint8_t {
  to_default,    ///< as if the key were absent
  needs_caller,  ///< an error: only the caller can know the value
  is_a_value     ///< an ordinary string
};

template <class T>
struct Key : KeyFacts {
  std::string name;
  std::function<void(T&, const Value&)> read;
  /// Lists the keys below, for known_keys().
  std::function<void(const std::string& prefix, std::vector<KeyInfo>&)> list;
  bool reads_null = false;        ///< else null means absent
  std::optional<Auto> auto_rule;  ///< where it differs from the table's

  Key with_auto(Auto rule) && {
    auto_rule = rule;
    return std::move(*this);
  }
  Key alias(std::string other) && {
    aliases.push_back(std::move(other));
    return std::move(*this);
  }
  Key takes(std::string what) && {
    values = std::move(what);
    return std::move(*this);
  }
  Key one_of(std::vector<std::string> words) && {
    choices = std::move(words);
    return std::move(*this);
  }
};

/// What the page of keys says of one: a list of them stands beside each table.
struct Text {
  const char *name, *meaning, *difference = "", *derived = "";
  bool required = false;
};
/// Of a key whose default is no fixed value: `rule` in words.
constexpr Text derived(const char* name, const char* rule, const char* meaning, const char* difference = "") {
  return {name, meaning, difference, rule};
}
constexpr Text required(const char* name, const char* meaning, const char* difference = "") {
  return {name, meaning, difference, "", true};
}

template <class T>
void describe(Key<T>& key, const Text& text) {
  key.meaning = text.meaning, key.difference = text.difference, key.required = text.required;
  if (*text.derived) key.derived = text.derived;
}

/// Gives each key the text of its name. Throws for a text without a key; keys without a text fail a test.
template <class T>
void describe(std::vector<Key<T>>& keys, const std::vector<Text>& texts) {
  for (const Text& text : texts) {
    bool found = false;
    for (Key<T>& key : keys)
      if (key.name == text.name) describe(key, text), found = true;
    require(found, "a text speaks of the key ", text.name, ", which its table does not have");
  }
}

template <class T>
struct Table {
  Auto auto_rule = Auto::is_a_value;
  std::vector<Key<T>> keys;
};

/// The keys that an object gave, by their first name.
using Given = std::map<std::string, const Node*>;

/// Throws the error for a key that `known` does not have.
[[noreturn]] void unknown_key(const Value& section, const std::string& name, const Node& value,
                              const std::vector<std::string>& known);
[[noreturn]] void given_twice(const Value& value, const std::string& other);

/// True when "auto" was dealt with and the key counts as absent.
bool handle_auto(Auto rule, const Value& value);

inline std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Reads the value of one key into `target`, unless it counts as absent.
template <class T>
void read_key(const Table<T>& table, T& target, const Value& section, const std::string& name,
              const Node& node, Given& given, std::map<std::string, std::string>& spelled) {
  const Value value{node, join(section.path, name), section.context};
  const Key<T>* key = nullptr;
  for (const Key<T>& candidate : table.keys)
    if (candidate.name == name ||
        std::find(candidate.aliases.begin(), candidate.aliases.end(), name) != candidate.aliases.end())
      key = &candidate;
  if (!key) {
    std::vector<std::string> known;
    for (const Key<T>& candidate : table.keys) known.push_back(candidate.name);
    unknown_key(section, name, node, known);
  }
  if (!spelled.emplace(key->name, name).second) given_twice(value, spelled[key->name]);
  if ((node.is(Node::Kind::null) && !key->reads_null) ||
      handle_auto(key->auto_rule.value_or(table.auto_rule), value))
    return;
  given[key->name] = &node;
  key->read(target, value);
}

/// Reads `section` by `table` into `target`, in file order. Throws Reported when a key had a problem.
template <class T>
Given read_section(const Table<T>& table, T& target, const Value& section) {
  section.expect(Node::Kind::object);
  Given given;
  std::map<std::string, std::string> spelled;
  const std::size_t problems = section.context.problems.size();
  for (const auto& [name, node] : section.node.members)
    section.context.attempt([&] { read_key(table, target, section, name, node, given, spelled); });
  if (section.context.problems.size() > problems) throw Reported{};
  return given;
}

template <class T>
void list_keys(const Table<T>& table, const std::string& prefix, std::vector<KeyInfo>& out) {
  for (const Key<T>& key : table.keys) {
    const std::string path = join(prefix, key.name);
    if (key.list)
      key.list(path, out);
    else
      out.push_back({static_cast<const KeyFacts&>(key), path});
  }
}

// ---- makers of keys ----

/// A key that `read` handles.
template <class T>
Key<T> custom(std::string name, std::string example, std::function<void(T&, const Value&)> read) {
  Key<T> key;
  key.name = std::move(name), key.example = std::move(example), key.read = std::move(read);
  return key;
}

template <class T>
Key<T> boolean(std::string name, bool T::*field) {
  const auto defaults = std::make_unique<const T>();
  return custom<T>(std::move(name), (*defaults).*field ? "false" : "true",
                   [field](T& target, const Value& value) { target.*field = value.boolean(); })
      .takes("true or false");
}

template <class T, std::integral I>
Key<T> integer(std::string name, I T::*field, std::string example, std::int64_t min,
               std::int64_t max = int64_max) {
  max = std::cmp_less(std::numeric_limits<I>::max(), max)
            ? static_cast<std::int64_t>(std::numeric_limits<I>::max())
            : max;
  return custom<T>(
             std::move(name), std::move(example),
             [=](T& target, const Value& value) { target.*field = static_cast<I>(value.integer(min, max)); })
      .takes(integers(min, max));
}

template <class T>
Key<T> real(std::string name, double T::*field, std::string example, double min = -infinity,
            double max = infinity, bool open_min = false) {
  return custom<T>(std::move(name), std::move(example),
                   [=](T& target, const Value& value) { target.*field = value.real(min, max, open_min); })
      .takes(reals(min, max, open_min));
}

template <class T>
Key<T> text(std::string name, std::string T::*field, std::string example) {
  return custom<T>(std::move(name), std::move(example),
                   [field](T& target, const Value& value) { target.*field = value.text(); })
      .takes("string");
}

/// An enum whose values are 0, 1, 2, … in the order of `names`.
template <class T, class E>
Key<T> choice(std::string name, E T::*field, std::vector<std::string> names, std::string example,
              Synonyms meant = {}) {
  return custom<T>(std::move(name), std::move(example),
                   [=](T& target, const Value& value) {
                     target.*field = static_cast<E>(value.choice(names, meant));
                   })
      .one_of(names);
}

/// A section read by `table` into a field.
template <class T, class U>
Key<T> section(std::string name, U T::*field, Table<U> table) {
  Key<T> key = custom<T>(std::move(name), "{}", [field, table](T& target, const Value& value) {
    read_section(table, target.*field, value);
  });
  key.list = [table](const std::string& prefix, std::vector<KeyInfo>& out) { list_keys(table, prefix, out); };
  return key;
}

/// All that is said of `key`, as a key of T that `read` handles.
template <class T, class U>
Key<T> copied(const Key<U>& key, std::function<void(T&, const Value&)> read) {
  Key<T> out;
  static_cast<KeyFacts&>(out) = key;
  out.name = key.name, out.list = key.list, out.reads_null = key.reads_null, out.auto_rule = key.auto_rule;
  out.read = std::move(read);
  return out;
}

/// A key of T's member `field`, as a key of T.
template <class T, class U>
Key<T> inside(U T::*field, Key<U> key) {
  return copied<T>(key,
                   [field, read = key.read](T& target, const Value& value) { read(target.*field, value); });
}

/// What a key without effect must hold, so that a wrong type is still an error.
enum class Holds : std::uint8_t { boolean, count, real, text, anything };

/// A key that is accepted without effect, for `reason`.
template <class T>
Key<T> noted(std::string name, Holds holds, std::string reason);

/// A key that is refused for `reason` unless `off` accepts its value.
template <class T>
Key<T> refused(std::string name, std::string example, std::string reason,
               std::function<bool(const Value&)> off);

/// Values that switch a feature off, for refused().
bool is_false(const Value& value);
bool is_empty(const Value& value);
std::function<bool(const Value&)> equals_number(double number);
bool never(const Value& value);

void check_holds(Holds holds, const Value& value);

template <class T>
Key<T> noted(std::string name, Holds holds, std::string reason) {
  static const char* const examples[] = {"true", "3", "0.5", "\"x\"", "{}"};
  static const char* const values[] = {"true or false", "integer >= 0", "finite number", "string",
                                       "anything"};
  Key<T> key = custom<T>(std::move(name), examples[static_cast<int>(holds)], [=](T&, const Value& value) {
    check_holds(holds, value);
    value.note(reason);
  });
  key.effect = Effect::noted, key.reason = std::move(reason), key.values = values[static_cast<int>(holds)];
  return key;
}

template <class T>
Key<T> refused(std::string name, std::string example, std::string reason,
               std::function<bool(const Value&)> off) {
  Key<T> key = custom<T>(std::move(name), std::move(example), [=](T&, const Value& value) {
    if (!off(value)) value.error("Sherd does not support ", value.node.brief(), " here: ", reason);
    value.note("off, as always here");
  });
  key.effect = Effect::refused, key.reason = std::move(reason);
  return key;
}

}  // namespace sherd::config
