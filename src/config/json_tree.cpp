#include "config/json_tree.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/text/excerpt.h"
#include "base/text/utf8.h"

namespace sherd::config {
namespace {

/// How far a text has been read.
struct Position {
  const char* at = nullptr;
  const char* line_start = nullptr;
  int line = 1;
  /// The column of the last character that was read, from 1 on.
  std::ptrdiff_t column() const { return at - line_start; }
};

// A char iterator that tells its position, so that SAX events know theirs.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  CountingIterator(const char* at, Position* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    const bool ends_line = *at_ == '\n';
    position_->at = ++at_;
    if (ends_line) ++position_->line, position_->line_start = at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  Position* position_;
};

/// Whether a line of a text that a zero ends begins with `name:`, behind a brace at most.
bool has_bare_key(const char* line) {
  line += std::strspn(line, " \t\r{,");
  const std::size_t name =
      std::strspn(line, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
  return name > 0 && line[name + std::strspn(line + name, " \t")] == ':';
}

// Builds Nodes from nlohmann's SAX events.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string file, const Position* position) : file_(std::move(file)), position_(position) {}
  Node root;

  bool null() override { return add(Node()); }
  bool boolean(bool value) override { return add(node_of(value)); }
  bool number_integer(number_integer_t value) override { return add(node_of(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value <= static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
      return number_integer(static_cast<std::int64_t>(value));
    return number_float(static_cast<double>(value), {});
  }
  bool number_float(number_float_t value, const string_t&) override { return add(node_of(value)); }
  bool string(string_t& value) override { return add(node_of(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Node::Kind::object); }
  bool start_array(std::size_t) override { return open(Node::Kind::array); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    if (const Node* first = open_.back()->find(name); first && !is_note(name))
      fail(ErrorKind::config, file_, ":", position_->line, ": key \"", excerpt(name),
           "\" is already given on line ", first->place.line, "; remove one of the two");
    key_ = name;
    key_line_ = position_->line;
    return true;
  }
  bool parse_error(std::size_t, const std::string& token, const nlohmann::detail::exception& error) override {
    // nlohmann's text begins "[json.exception.parse_error.101] parse error at line 3, column 5: " and quotes
    // the token.
    std::string what = error.what();
    if (const auto bracket = what.find("] "); bracket != std::string::npos) what = what.substr(bracket + 2);
    if (const auto colon = what.find(": "); colon != std::string::npos) what = what.substr(colon + 2);
    if (const auto quoted = what.find(token); quoted != std::string::npos)
      what.replace(quoted, token.size(), excerpt(token, 40));
    fail(ErrorKind::config, file_, ":", position_->line, ":", position_->column(),
         ": not valid JSON: ", excerpt(what, 300),
         has_bare_key(position_->line_start)
             ? "; a key without quotes is HJSON, of which Sherd reads the comments alone: put it in quotes, "
               "or convert the file (hjson -j FILE)"
             : "");
  }

 private:
  bool in_object() const { return !open_.empty() && open_.back()->is(Node::Kind::object); }
  Node* place_node(Node node) {
    if (++values_ > most_values)
      fail(ErrorKind::config, file_, ":", position_->line, ": more than ", most_values,
           " values, which no configuration needs; is this another file?");
    node.place = {file_, in_object() ? key_line_ : position_->line};
    if (open_.empty()) return &(root = std::move(node));
    Node& parent = *open_.back();
    if (in_object()) return &parent.members.emplace_back(key_, std::move(node)).second;
    return &parent.items.emplace_back(std::move(node));
  }
  bool add(Node node) { return place_node(std::move(node)), true; }
  // Pointers in open_ stay valid: a container only grows while it is the innermost open one.
  bool open(Node::Kind kind) {
    if (open_.size() == most_levels)
      fail(ErrorKind::config, file_, ":", position_->line, ":", position_->column(), ": nested deeper than ",
           most_levels, " levels, which no configuration needs; is this another file?");
    Node node;
    node.kind = kind;
    open_.push_back(place_node(std::move(node)));
    return true;
  }

  std::string file_, key_;
  const Position* position_;
  int key_line_ = 0;
  std::size_t values_ = 0;
  std::vector<Node*> open_;
};

std::size_t end_of_string(const std::string& text, std::size_t quote) {
  std::size_t i = quote + 1;
  while (i < text.size() && text[i] != '"' && text[i] != '\n') i += text[i] == '\\' ? 2 : 1;
  return std::min(i, text.size());
}

/// JavaScript's, and Python's, which HJSON has too.
bool begins_comment(const std::string& text, std::size_t at) {
  return text[at] == '#' ||
         (text[at] == '/' && at + 1 < text.size() && (text[at + 1] == '/' || text[at + 1] == '*'));
}

std::size_t end_of_comment(const std::string& text, std::size_t begin) {
  const bool block = text.compare(begin, 2, "/*") == 0;
  const std::size_t end = text.find(block ? "*/" : "\n", begin + (block ? 2 : 1));
  if (end == std::string::npos) return text.size();
  return block ? end + 2 : end;
}

// Blanks comments and commas before a closing bracket, leaving line breaks where they are.
std::string strip_extras(std::string_view source) {
  std::string text(source);
  std::size_t comma = std::string::npos;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      i = end_of_string(text, i);
    } else if (begins_comment(text, i)) {
      const std::size_t end = end_of_comment(text, i);
      std::replace_if(
          text.begin() + static_cast<std::ptrdiff_t>(i), text.begin() + static_cast<std::ptrdiff_t>(end),
          [](char x) { return x != '\n'; }, ' ');
      i = end - 1;
      continue;
    } else if ((c == '}' || c == ']') && comma != std::string::npos) {
      text[comma] = ' ';
    }
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') continue;
    comma = c == ',' ? i : std::string::npos;
  }
  return text;
}

nlohmann::ordered_json json_of(const Node& node) {
  nlohmann::ordered_json out;
  switch (node.kind) {
    case Node::Kind::null:
      break;
    case Node::Kind::boolean:
      return node.boolean;
    case Node::Kind::integer:
      return node.integer;
    case Node::Kind::number:
      return node.number;
    case Node::Kind::string:
      return node.text;
    case Node::Kind::array:
      out = nlohmann::ordered_json::array();
      for (const Node& item : node.items) out.push_back(json_of(item));
      break;
    case Node::Kind::object:
      out = nlohmann::ordered_json::object();
      for (const auto& [name, value] : node.members) out[name] = json_of(value);
  }
  return out;
}

void set_place(Node& node, const SourcePlace& place) {
  node.place = place;
  for (Node& item : node.items) set_place(item, place);
  for (auto& member : node.members) set_place(member.second, place);
}

/// The value that `part` of a path names in `node`, "groups" or "groups[0]"; null where it is not there.
Node* step_into(Node& node, const std::string& part) {
  const auto open = part.find('[');
  Node* found = node.find(part.substr(0, open));
  if (!found || open == std::string::npos) return found;
  std::size_t index = found->items.size();
  const char* const end = part.data() + part.size();
  const auto read = std::from_chars(part.data() + open + 1, end, index);
  const bool good = read.ec == std::errc() && std::string_view(read.ptr, end) == "]";
  return good && index < found->items.size() ? &found->items[index] : nullptr;
}

/// The entry of a list that `path` names: "optimizer.groups[0]".
Node& entry_of(Node& root, const std::string& path, const SourcePlace& place) {
  Node* node = &root;
  for (std::size_t begin = 0, end = 0; begin <= path.size(); begin = end + 1) {
    end = std::min(path.find('.', begin), path.size());
    node = step_into(*node, path.substr(begin, end - begin));
    if (!node || !node->is(Node::Kind::object))
      fail(ErrorKind::config, place.str(), ": there is no entry ", excerpt(path.substr(0, end)),
           " in the configuration");
  }
  return *node;
}

}  // namespace

std::string SourcePlace::str() const {
  return line > 0 ? cat(file, ":", line) : file;
}

const Node* Node::find(std::string_view name) const {
  for (const auto& [key, value] : members)
    if (key == name) return &value;
  return nullptr;
}

Node* Node::find(std::string_view name) {
  return const_cast<Node*>(static_cast<const Node*>(this)->find(name));
}

std::string Node::brief() const {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return boolean ? "true" : "false";
    case Kind::integer:
      return std::to_string(integer);
    case Kind::number:
      return nlohmann::json(number).dump();
    case Kind::string:
      return cat('"', excerpt(text, 60), '"');
    case Kind::array:
      return items.empty() ? "[]" : "[…]";
    case Kind::object:
      return members.empty() ? "{}" : "{…}";
  }
  return "?";
}

std::string Node::json(int indent) const {
  return json_of(*this).dump(indent);
}

bool Node::operator==(const Node& other) const {
  const auto is_number = [](const Node& node) { return node.is(Kind::integer) || node.is(Kind::number); };
  if (is_number(*this) && is_number(other)) return number == other.number;
  return kind == other.kind && boolean == other.boolean && text == other.text && items == other.items &&
         members == other.members;
}

Node node_of(bool value) {
  Node node;
  node.kind = Node::Kind::boolean, node.boolean = value;
  return node;
}

Node node_of(double value) {
  Node node;
  node.kind = Node::Kind::number, node.number = value;
  return node;
}

Node node_of(std::string value) {
  Node node;
  node.kind = Node::Kind::string, node.text = std::move(value);
  return node;
}

Node node_of(std::vector<std::pair<std::string, Node>> members) {
  Node node;
  node.kind = Node::Kind::object, node.members = std::move(members);
  return node;
}

std::string_view name_of(Node::Kind kind) {
  switch (kind) {
    case Node::Kind::null:
      return "null";
    case Node::Kind::boolean:
      return "a boolean";
    case Node::Kind::integer:
      return "an integer";
    case Node::Kind::number:
      return "a number";
    case Node::Kind::string:
      return "a string";
    case Node::Kind::array:
      return "a list";
    case Node::Kind::object:
      return "a section";
  }
  return "?";
}

Node parse_tree(std::string_view text, const std::string& file) {
  if (text.size() > most_bytes)
    fail(ErrorKind::config, file, ": larger than ", most_bytes >> 20,
         " MiB, which no configuration needs; is this another file?");
  const std::string plain = strip_extras(text);
  Position position{plain.data(), plain.data()};
  TreeBuilder builder(file, &position);
  nlohmann::json::sax_parse(CountingIterator(plain.data(), &position),
                            CountingIterator(plain.data() + plain.size(), &position), &builder);
  return std::move(builder.root);
}

bool parse_value(std::string_view text, Node& out) {
  try {
    out = parse_tree(text, "");
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_note(std::string_view name) {
  return name.starts_with("_") || name.starts_with("//") || name == "comment" || name == "$schema";
}

void drop_notes(Node& node) {
  std::erase_if(node.members, [](const auto& member) { return is_note(member.first); });
  for (auto& member : node.members) drop_notes(member.second);
  for (Node& item : node.items) drop_notes(item);
}

void merge(Node& base, Node over) {
  if (!base.is(Node::Kind::object) || !over.is(Node::Kind::object)) {
    base = std::move(over);
    return;
  }
  const Node* old_type = base.find("type");
  const Node* new_type = over.find("type");
  if (old_type && new_type && old_type->text != new_type->text && over.find("params"))
    std::erase_if(base.members, [](const auto& member) { return member.first == "params"; });
  base.place = over.place;
  for (auto& [name, value] : over.members) {
    if (Node* present = base.find(name))
      merge(*present, std::move(value));
    else
      base.members.emplace_back(name, std::move(value));
  }
}

Node* find_path(Node& root, std::string_view path) {
  Node* node = &root;
  while (node && !path.empty()) {
    const auto end = std::min(path.find('.'), path.size());
    node = node->find(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return node;
}

void put_path(Node& root, std::string path, Node value) {
  // One object per part, innermost first.
  while (true) {
    const auto dot = path.rfind('.');
    Node parent;
    parent.kind = Node::Kind::object;
    parent.place = value.place;
    parent.members.emplace_back(dot == std::string::npos ? path : path.substr(dot + 1), std::move(value));
    value = std::move(parent);
    if (dot == std::string::npos) break;
    path.resize(dot);
  }
  merge(root, std::move(value));
}

void apply_override(Node& root, const std::string& assignment) {
  const SourcePlace place{cat("--set ", excerpt(assignment)), 0};
  const auto equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    fail(ErrorKind::config, place.str(), ": an override has the form section.key=VALUE");
  if (invalid_utf8_bytes(assignment) > 0) fail(ErrorKind::config, place.str(), ": not valid UTF-8");
  if (std::count(assignment.begin(), assignment.begin() + static_cast<std::ptrdiff_t>(equals), '.') >=
      static_cast<std::ptrdiff_t>(most_levels))
    fail(ErrorKind::config, place.str(), ": the key path has more than ", most_levels, " parts");
  Node value;
  const std::string text = assignment.substr(equals + 1);
  if (!parse_value(text, value)) {
    value.kind = Node::Kind::string;
    value.text = text;
  }
  set_place(value, place);
  std::string path = assignment.substr(0, equals);
  Node* target = &root;
  if (const auto close = path.rfind("]."); close != std::string::npos) {
    target = &entry_of(root, path.substr(0, close + 1), place);
    path.erase(0, close + 2);
  }
  if (path.empty() || path.front() == '.' || path.back() == '.' || path.find("..") != std::string::npos)
    fail(ErrorKind::config, place.str(), ": the key path has an empty part");
  put_path(*target, std::move(path), std::move(value));
}

}  // namespace sherd::config
