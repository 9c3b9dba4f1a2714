#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "config/keys.h"

namespace sherd::config {

/// Where a value was written: file and line, or an override.
struct SourcePlace {
  std::string file;
  int line = 0;             ///< 0: not in a file
  std::string str() const;  ///< "run.json:12", or the file alone
};

/// One JSON value that remembers where it stands. Internal to this room.
struct Node {
  enum class Kind : std::uint8_t { null, boolean, integer, number, string, array, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::int64_t integer = 0;
  double number = 0;  ///< also set for integers
  std::string text;
  std::vector<Node> items;
  std::vector<std::pair<std::string, Node>> members;  ///< in file order, names unique
  SourcePlace place;  ///< where the key stands, or the value where there is none

  /// The row of the key whose value a table wrote here; null where the node was parsed.
  const KeyInfo* key = nullptr;

  bool is(Kind other) const { return kind == other; }
  bool is_text(std::string_view value) const { return kind == Kind::string && text == value; }
  const Node* find(std::string_view name) const;
  Node* find(std::string_view name);
  /// The value as one line of JSON, shortened, for messages.
  std::string brief() const;
  /// The whole value as JSON; `indent` as nlohmann's dump() has it, -1: in one line.
  std::string json(int indent = -1) const;
  /// The same value, wherever it stands; an integer equals the number that it is.
  bool operator==(const Node& other) const;
};

Node node_of(bool value);
Node node_of(double value);
Node node_of(std::string value);
inline Node node_of(const char* value) {
  return node_of(std::string(value));
}
template <std::integral I>
Node node_of(I value) {
  Node node;
  node.kind = Node::Kind::integer;
  node.integer = static_cast<std::int64_t>(value), node.number = static_cast<double>(value);
  return node;
}
/// A list of whatever node_of() takes.
template <class List>
Node list_of(const List& values) {
  Node node;
  node.kind = Node::Kind::array;
  for (const auto& value : values) node.items.push_back(node_of(value));
  return node;
}
/// An object.
Node node_of(std::vector<std::pair<std::string, Node>> members);

/// "null", "a boolean", "an integer", …
std::string_view name_of(Node::Kind kind);

/// A configuration is at most this large: far more than any needs, and little enough to read in a moment.
inline constexpr std::size_t most_bytes = std::size_t{16} << 20, most_values = 20'000, most_levels = 64;

/// Parses one JSON text; comments and trailing commas are allowed, a key given twice in an object is not, but
/// for notes. Throws Error{config} with file and line, also for one that is larger or deeper than the bounds
/// above.
Node parse_tree(std::string_view text, const std::string& file);

/// Parses a file, which must hold an object; `what` it is goes into errors. Throws Error{io} and
/// Error{config}.
Node read_tree(const std::string& path, const char* what);

/// Parses one JSON value without an enclosing file; false when `text` is not JSON.
bool parse_value(std::string_view text, Node& out);

/// Whether a key is a note to readers, without effect: "_…", "//…" and "comment"; or "$schema", a note to
/// editors.
bool is_note(std::string_view name);
/// The same as a regular expression.
inline constexpr const char* note_pattern = "^(_|//)|^(comment|\\$schema)$";
/// Removes the notes from an object and all below.
void drop_notes(Node& node);

/// Lays `over` on `base`: objects merge key by key, anything else is replaced. Where `over` brings another
/// "type" and "params" of its own, those replace the old ones whole, since parameters belong to their type.
void merge(Node& base, Node over);

/// The value at "a.b.c"; null where there is none.
Node* find_path(Node& root, std::string_view path);
/// Merges a value in at "a.b.c", with sections as needed, which get the value's place.
void put_path(Node& root, std::string path, Node value);

/// Applies "a.b.c=VALUE", or "a.b[0].c=VALUE" to an entry of a list that is there; VALUE is JSON, or else a
/// string.
void apply_override(Node& root, const std::string& assignment);

}  // namespace sherd::config
