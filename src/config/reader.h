#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "config/keys.h"
#include "config/value.h"

// The machinery behind the tables of keys. A Table<T> is the one list of the keys that a section may have. A
// row, Key<T>, says all of its key: names, how it is read into a T and written from it, what it takes, its
// meaning, what DeepSpeed does otherwise, who has to agree on it. Everything else (dump(), comparisons,
// suggestions, the page of keys, the schema) goes by the rows. rows.h has makers of rows.
//
// Internal to this room.
namespace sherd::config {

/// How a section treats the string "auto" (DeepSpeed leaves that to its callers).
enum class Auto : std::uint8_t {
  to_default,    ///< as if the key were absent
  needs_caller,  ///< an error: only the caller can know the value
  is_a_value     ///< an ordinary string
};

/// Which keys are written.
enum class Selection : std::uint8_t {
  told,  ///< keys that say something; dump() has these
  /// All keys that have a value, also those that have no effect beside others, but for those whose default
  /// depends on others. Each key is found with its default.
  whole
};

// A row may say these behind its meaning; a plain text tells what DeepSpeed does otherwise.

enum class Flag : std::uint8_t {
  required,            ///< its section is refused without it
  decides_parameters,  ///< it decides which parameters a model has, and their shapes
  reads_null,          ///< null is a value of its own; else it means absent
  writes_null,         ///< where it is not given, null is written; else nothing
  unless_default       ///< written only where it differs from its default
};
inline constexpr Flag required = Flag::required, shapes = Flag::decides_parameters,
                      null_too = Flag::reads_null, or_null = Flag::writes_null,
                      unless_default = Flag::unless_default;
struct Default {
  std::string words;
};
struct Alias {
  std::string name;
};
struct Instead {
  std::string name;
};
struct Idle {
  std::function<std::string(const Config&)> why;
};

/// The default is no fixed value: `rule` in words.
inline Default by(std::string rule) {
  return {std::move(rule)};
}
/// Another name that means the same.
inline Alias also(std::string name) {
  return {std::move(name)};
}
/// The key is required, but `other` may stand in its place.
inline Instead instead_of(std::string other) {
  return {std::move(other)};
}
/// `why` gives the reason where the key has no effect beside the rest of the file; else an empty text.
inline Idle idle(std::function<std::string(const Config&)> why) {
  return {std::move(why)};
}
/// The key has no effect where `holds` does, for that one reason.
inline Idle idle(bool (*holds)(const Config&), std::string reason) {
  return {[holds, reason = std::move(reason)](const Config& config) { return holds(config) ? reason : ""; }};
}

/// The part of a row that does not depend on the type its key is read into. Many files are full of rows: so
/// code for this part is compiled once.
struct Row : KeyInfo {
  bool reads_null = false;             ///< false: null means absent
  bool writes_null = false;            ///< false: null is left out
  std::optional<Auto> auto_rule = {};  ///< none: the table's

  Row();
  Row(const Row&);
  Row(Row&&) noexcept;
  Row& operator=(const Row&) = delete;  // row = std::move(row).means(…) would move a row into itself
  ~Row();

 protected:
  void apply(std::string_view deepspeed);
  void apply(Default rule);
  void apply(Alias other);
  void apply(Instead other);
  void apply(Idle because);
  void apply(Concerns who);
  void apply(Auto rule);
  void apply(Flag flag);
  void take(Takes what);
  void take_one_of(std::vector<std::string> those);
};

/// Chained calls give back the row itself, so that a temporary row lives until the whole expression ends.
template <class T>
struct Key : Row {
  std::function<void(T&, const Value&)> read;
  /// Gives the value in a T, or null where that says nothing. A key without this function is written by
  /// others.
  std::function<Node(const T&, Selection)> write = {};
  std::function<bool(const T&)> matters = {};   ///< false: it has no effect beside the others
  std::function<bool(const T&)> left_out = {};  ///< true: the value is not written
  std::function<bool(const T&)> can_say = {};   ///< false: it has no word for the value

  /// Says what the key is, and what else there is to know of it.
  template <class... Tags>
  Key&& means(std::string_view what, Tags... tags) && {
    meaning = what;
    return std::move(*this).with(std::move(tags)...);
  }
  template <class... Tags>
  Key&& with(Tags... tags) && {
    (tag(std::move(tags)), ...);
    return std::move(*this);
  }
  Key&& alias(std::string_view other) && { return std::move(*this).with(also(std::string(other))); }
  Key&& takes(Takes what) && {
    take(std::move(what));
    return std::move(*this);
  }
  Key&& one_of(std::vector<std::string> those) && {
    take_one_of(std::move(those));
    return std::move(*this);
  }
  /// `more` is called once the value is read: for checks that take more than a range, and what else follows.
  Key&& then(std::function<void(T&, const Value&)> more) && {
    read = [first = std::move(read), more = std::move(more)](T& target, const Value& value) {
      first(target, value);
      more(target, value);
    };
    return std::move(*this);
  }
  /// Is written as `as` says; null: not at all.
  Key&& written(std::function<Node(const T&)> as) && {
    write = [as = std::move(as)](const T& source, Selection) { return as(source); };
    return std::move(*this);
  }
  /// `value` in the field means that the key is not given.
  template <class V>
  Key&& unset(V value) && {
    write = [first = std::move(write), none = node_of(value)](const T& source, Selection selection) {
      Node node = first(source, selection);
      return node == none ? Node() : node;
    };
    return std::move(*this);
  }
  /// Where it does not hold, the key has no effect; the table's `finish` says so.
  Key&& where(std::function<bool(const T&)> holds) && {
    matters = std::move(holds);
    return std::move(*this);
  }
  /// DeepSpeed's key `same` means this one; the other is set() in its own table.
  template <class U>
  Key&& also_as(U T::*field, const SameValue& same) && {
    read = [first = std::move(read), field, same](T& target, const Value& value) {
      T asked;
      first(asked, value);
      set(target.*field, same, asked.*field, value);
    };
    return std::move(*this);
  }

 private:
  template <class Tag>
  void tag(Tag what) {
    if constexpr (std::is_same_v<Tag, Flag>) {
      if (what == Flag::unless_default)
        left_out = [value = write](const T& source) {
          return value(source, Selection::told) == value(T(), Selection::told);
        };
    }
    apply(std::move(what));
  }
};

/// The keys that an object gave, by their first name.
using Given = std::map<std::string, const Node*>;

template <class T>
struct Table {
  Auto auto_rule = Auto::is_a_value;
  std::vector<Key<T>> keys = {};
  /// Draws conclusions from the keys that were given; throws where they contradict each other.
  std::function<void(T&, const Given&, const Value&)> finish = {};
};

/// Throws the error for a key that `known` does not have.
[[noreturn]] void unknown_key(const Value& section, const std::string& name, const Node& value,
                              const std::vector<std::string>& known);
[[noreturn]] void given_twice(const Value& value, const std::string& other);

/// True when "auto" was dealt with and the key counts as absent.
bool handle_auto(Auto rule, const Value& value);

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
  if (table.finish) table.finish(target, given, section);
  return given;
}

/// The section as an object that read_section() reads to the same.
template <class T>
Node written(const Table<T>& table, const T& source, Selection selection = Selection::told) {
  Node out;
  out.kind = Node::Kind::object;
  for (const Key<T>& key : table.keys) {
    if (!key.write) continue;
    const bool whole = selection == Selection::whole && key.derived.empty();
    if (!whole && ((key.matters && !key.matters(source)) || (key.left_out && key.left_out(source)))) continue;
    Node value = key.write(source, selection);
    if (value.is(Node::Kind::null) && selection == Selection::told && !key.writes_null) continue;
    value.key = &key;
    out.members.emplace_back(key.name, std::move(value));
  }
  return out;
}

/// Nodes point at the rows that wrote them, so a table must stay.
template <class T>
Node written(const Table<T>&& table, const T& source, Selection selection = Selection::told) = delete;

/// The rows without how they are read and written.
template <class T>
std::vector<KeyInfo> infos(const Table<T>& table) {
  std::vector<KeyInfo> out(table.keys.begin(), table.keys.end());
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i].takes_auto = table.keys[i].auto_rule.value_or(table.auto_rule) != Auto::is_a_value;
  return out;
}

/// Notes the keys that were given and do not matter beside the others.
template <class T>
void note_idle(const Table<T>& table, const T& target, const Given& given, const Value& section,
               const std::string& why) {
  for (const Key<T>& key : table.keys)
    if (given.contains(key.name) && key.matters && !key.matters(target))
      section.context.note(join(section.path, key.name), why);
}

}  // namespace sherd::config
