#pragma once

#include <concepts>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/reader.h"

// Makers of rows (Key<T>) for the usual kinds of fields. What a row says beside is chained to them:
//
//   integer("seed", &Data::seed, "7", 0).means("of the shuffle")
//
// Internal to this room.
namespace sherd::config {

/// A key that `read` and `write` handle.
template <class T>
Key<T> custom(std::string_view name, std::string_view example, std::function<void(T&, const Value&)> read,
              std::function<Node(const T&)> write = {}) {
  Key<T> key;
  key.name = name, key.example = example, key.read = std::move(read);
  if (write) key.write = [write = std::move(write)](const T& source, Selection) { return write(source); };
  return key;
}

/// A field of T that `parse` reads; in an optional nothing stands for a key that is not given.
template <class T, class F, class Parse>
Key<T> field_key(std::string_view name, std::string_view example, F T::*field, Parse parse) {
  return custom<T>(
      name, example, [=](T& target, const Value& value) { target.*field = std::invoke(parse, value); },
      [=](const T& source) {
        if constexpr (requires(F f) { f.has_value(); })
          return source.*field ? node_of(*(source.*field)) : Node();
        else
          return node_of(source.*field);
      });
}

template <class T>
Key<T> boolean(std::string_view name, bool T::*field) {
  const auto defaults = std::make_unique<const T>();
  return field_key(name, (*defaults).*field ? "false" : "true", field, &Value::boolean)
      .takes({"true or false", R"({"type": "boolean"})"});
}

template <class T, class I>
Key<T> integer(std::string_view name, I T::*field, std::string_view example, std::int64_t min,
               std::int64_t max = int64_max) {
  if constexpr (std::integral<I>)
    max = std::cmp_less(std::numeric_limits<I>::max(), max)
              ? static_cast<std::int64_t>(std::numeric_limits<I>::max())
              : max;
  return field_key(name, example, field,
                   [=](const Value& value) { return static_cast<I>(value.integer(min, max)); })
      .takes(integers(min, max));
}

/// F: double, or an optional of it.
template <class T, class F>
Key<T> real(std::string_view name, F T::*field, std::string_view example, double min = -infinity,
            double max = infinity, bool open_min = false) {
  return field_key(name, example, field, [=](const Value& value) { return value.real(min, max, open_min); })
      .takes(reals(min, max, open_min));
}

template <class T>
Key<T> text(std::string_view name, std::string T::*field, std::string_view example) {
  return field_key(name, example, field, &Value::text).takes({"string", R"({"type": "string"})"});
}

/// Bytes, as a number or as "8GB".
template <class T>
Key<T> bytes(std::string_view name, std::uint64_t T::*field, std::string_view example) {
  return field_key(name, example, field, &Value::bytes).takes(byte_sizes());
}

/// One of `names`, by its index. `get` gives -1 for none.
template <class T, class Get, class Set>
Key<T> word(std::string_view name, std::vector<std::string> names, std::string_view example, Get get, Set set,
            Synonyms meant = {}) {
  return custom<T>(
             name, example,
             [=](T& target, const Value& value) {
               set(target, static_cast<int>(value.choice(names, meant)));
             },
             [=](const T& source) {
               const int index = get(source);
               return index < 0 ? Node() : node_of(names.at(static_cast<std::size_t>(index)));
             })
      .one_of(names);
}

/// An enum, or an optional of one, whose values are 0, 1, 2, … in the order of `names`.
template <class T, class E>
Key<T> choice(std::string_view name, E T::*field, std::vector<std::string> names, std::string_view example,
              Synonyms meant = {}) {
  return word<T>(
      name, std::move(names), example,
      [field](const T& source) {
        if constexpr (std::is_enum_v<E>)
          return static_cast<int>(source.*field);
        else
          return source.*field ? static_cast<int>(*(source.*field)) : -1;
      },
      [field](T& target, int index) {
        if constexpr (std::is_enum_v<E>)
          target.*field = static_cast<E>(index);
        else
          target.*field = static_cast<typename E::value_type>(index);
      },
      std::move(meant));
}

/// A section read by `table` into what `access` gives of a T: a functor that takes it const or not.
template <class T, class U, class Access>
Key<T> section_at(std::string_view name, Table<U> table, Access access) {
  const auto shared = std::make_shared<const Table<U>>(std::move(table));
  Key<T> key = custom<T>(name, "{}", [shared, access](T& target, const Value& value) {
    read_section(*shared, access(target), value);
  });
  key.write = [shared, access](const T& source, Selection selection) {
    Node node = written(*shared, access(source), selection);
    return node.members.empty() ? Node() : node;
  };
  key.below = infos(*shared);
  return key;
}

/// A section that is a member of T.
template <class T, class U>
Key<T> section(std::string_view name, U T::*field, Table<U> table) {
  return section_at<T>(
      name, std::move(table), [field](auto& whole) -> auto& { return whole.*field; });
}

/// A section whose keys set members of T itself.
template <class T>
Key<T> section(std::string_view name, Table<T> table) {
  return section_at<T>(
      name, std::move(table), [](auto& whole) -> auto& { return whole; });
}

/// A section that a T need not have.
template <class T, class U>
Key<T> section(std::string_view name, std::optional<U> T::*field, Table<U> table) {
  const auto shared = std::make_shared<const Table<U>>(std::move(table));
  Key<T> key = custom<T>(name, "{}", [shared, field](T& target, const Value& value) {
    U read;
    read_section(*shared, read, value);
    target.*field = std::move(read);
  });
  key.write = [shared, field](const T& source, Selection selection) {
    return source.*field ? written(*shared, *(source.*field), selection) : Node();
  };
  key.below = infos(*shared);
  return key;
}

/// A list of sections.
template <class T, class U>
Key<T> list(std::string_view name, std::vector<U> T::*field, std::string_view example, Table<U> table) {
  const auto shared = std::make_shared<const Table<U>>(std::move(table));
  Key<T> key = custom<T>(name, example, [shared, field](T& target, const Value& value) {
    value.expect(Node::Kind::array);
    (target.*field).clear();
    const std::size_t problems = value.context.problems.size();
    for (std::size_t i = 0; i < value.node.items.size(); ++i)
      value.context.attempt([&] {
        U entry;
        read_section(*shared, entry, value.item(i));
        (target.*field).push_back(std::move(entry));
      });
    if (value.context.problems.size() > problems) throw Reported{};
  });
  key.write = [shared, field](const T& source, Selection selection) {
    Node out = list_of(std::vector<bool>());
    for (const U& entry : source.*field) out.items.push_back(written(*shared, entry, selection));
    return out;
  };
  key.below = infos(*shared), key.is_list = true, key.values = "list of objects";
  return key;
}

/// A key of what `access` gives of a T, as a key of T.
template <class T, class U, class Access>
Key<T> lifted(const Key<U>& key, Access access) {
  Key<T> out;
  static_cast<KeyInfo&>(out) = key;
  out.reads_null = key.reads_null, out.writes_null = key.writes_null, out.auto_rule = key.auto_rule;
  out.read = [access, read = key.read](T& target, const Value& value) { read(access(target), value); };
  if (key.write)
    out.write = [access, write = key.write](const T& source, Selection selection) {
      return write(access(source), selection);
    };
  if (key.matters)
    out.matters = [access, holds = key.matters](const T& source) { return holds(access(source)); };
  if (key.left_out)
    out.left_out = [access, holds = key.left_out](const T& source) { return holds(access(source)); };
  return out;
}

/// A key of T's member `field`, as a key of T.
template <class T, class U>
Key<T> inside(U T::*field, const Key<U>& key) {
  return lifted<T>(
      key, [field](auto& whole) -> auto& { return whole.*field; });
}

template <class T>
void append(std::vector<Key<T>>& keys, std::vector<Key<T>> more) {
  for (Key<T>& key : more) keys.push_back(std::move(key));
}

}  // namespace sherd::config
