#include "config/json_tree.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace sherd::config {
namespace {

// A char iterator that counts the lines it has passed, so that SAX events know theirs.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  CountingIterator(const char* at, int* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    if (*at_ == '\n') ++*line_;
    ++at_;
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
  int* line_;
};

// Builds Nodes from nlohmann's SAX events.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string file, const int* line) : file_(std::move(file)), line_(line) {}
  Node root;

  bool null() override { return add(make(Node::Kind::null)); }
  bool boolean(bool value) override {
    Node node = make(Node::Kind::boolean);
    node.boolean = value;
    return add(std::move(node));
  }
  bool number_integer(number_integer_t value) override {
    Node node = make(Node::Kind::integer);
    node.integer = value;
    node.number = static_cast<double>(value);
    return add(std::move(node));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value <= static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
      return number_integer(static_cast<std::int64_t>(value));
    return number_float(static_cast<double>(value), {});
  }
  bool number_float(number_float_t value, const string_t&) override {
    Node node = make(Node::Kind::number);
    node.number = value;
    return add(std::move(node));
  }
  bool string(string_t& value) override {
    Node node = make(Node::Kind::string);
    node.text = value;
    return add(std::move(node));
  }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Node::Kind::object); }
  bool start_array(std::size_t) override { return open(Node::Kind::array); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    if (const Node* first = open_.back()->find(name))
      fail(ErrorKind::config, file_, ":", *line_, ": key \"", name, "\" is already given on line ",
           first->place.line, "; remove one of the two");
    key_ = name;
    key_line_ = *line_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // nlohmann's text begins "[json.exception.parse_error.101] parse error at line 3, column 5: "
    std::string what = error.what();
    if (const auto colon = what.find(": "); colon != std::string::npos) what = what.substr(colon + 2);
    fail(ErrorKind::config, file_, ":", *line_, ": not valid JSON: ", what);
  }

 private:
  Node make(Node::Kind kind) const {
    Node node;
    node.kind = kind;
    node.place = {file_, in_object() ? key_line_ : *line_};
    return node;
  }
  bool in_object() const { return !open_.empty() && open_.back()->is(Node::Kind::object); }
  Node* place_node(Node node) {
    if (open_.empty()) return &(root = std::move(node));
    Node& parent = *open_.back();
    if (in_object()) return &parent.members.emplace_back(key_, std::move(node)).second;
    return &parent.items.emplace_back(std::move(node));
  }
  bool add(Node node) { return place_node(std::move(node)), true; }
  // Pointers in open_ stay valid: a container only grows while it is the innermost open one.
  bool open(Node::Kind kind) { return open_.push_back(place_node(make(kind))), true; }

  std::string file_, key_;
  const int* line_;
  int key_line_ = 0;
  std::vector<Node*> open_;
};

std::size_t end_of_string(const std::string& text, std::size_t quote) {
  std::size_t i = quote + 1;
  while (i < text.size() && text[i] != '"' && text[i] != '\n') i += text[i] == '\\' ? 2 : 1;
  return std::min(i, text.size());
}

std::size_t end_of_comment(const std::string& text, std::size_t begin) {
  const bool block = text[begin + 1] == '*';
  const std::size_t end = text.find(block ? "*/" : "\n", begin + 2);
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
    } else if (c == '/' && i + 1 < text.size() && (text[i + 1] == '/' || text[i + 1] == '*')) {
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

void set_place(Node& node, const Place& place) {
  node.place = place;
  for (Node& item : node.items) set_place(item, place);
  for (auto& member : node.members) set_place(member.second, place);
}

}  // namespace

std::string Place::str() const {
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
      return text.size() > 60 ? cat('"', text.substr(0, 57), "…\"") : cat('"', text, '"');
    case Kind::array:
      return items.empty() ? "[]" : "[…]";
    case Kind::object:
      return members.empty() ? "{}" : "{…}";
  }
  return "?";
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
  const std::string plain = strip_extras(text);
  int line = 1;
  TreeBuilder builder(file, &line);
  nlohmann::json::sax_parse(CountingIterator(plain.data(), &line),
                            CountingIterator(plain.data() + plain.size(), &line), &builder);
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

void apply_override(Node& root, const std::string& assignment) {
  const Place place{cat("--set ", assignment), 0};
  const auto equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    fail(ErrorKind::config, place.str(), ": an override has the form section.key=VALUE");
  Node value;
  const std::string text = assignment.substr(equals + 1);
  if (!parse_value(text, value)) {
    value.kind = Node::Kind::string;
    value.text = text;
  }
  set_place(value, place);
  // Wrap the value in one object per path component, innermost first, and merge that.
  std::string path = assignment.substr(0, equals);
  while (true) {
    const auto dot = path.rfind('.');
    const std::string name = dot == std::string::npos ? path : path.substr(dot + 1);
    if (name.empty()) fail(ErrorKind::config, place.str(), ": the key path has an empty part");
    Node parent;
    parent.kind = Node::Kind::object;
    parent.place = place;
    parent.members.emplace_back(name, std::move(value));
    value = std::move(parent);
    if (dot == std::string::npos) break;
    path.resize(dot);
  }
  merge(root, std::move(value));
}

}  // namespace sherd::config
