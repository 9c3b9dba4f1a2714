#include "config/reader.h"

#include <algorithm>
#include <cctype>

namespace sherd::config {
namespace {

bool same_word(std::string_view a, std::string_view b) {
  return a.size() == b.size() && edit_distance(a, b) == 0;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// Other sections that know a key of this name: a key in the wrong place is as common as a misspelt one.
std::string homes_of(const std::string& name) {
  for (const KeyInfo& key : known_keys())
    if (key.path.size() > name.size() && key.path.ends_with("." + name)) return key.path;
  return {};
}

std::string range_of(double min, double max, bool open_min) {
  if (min == -infinity && max == infinity) return "a finite number";
  if (max == infinity) return cat("a number ", open_min ? "> " : ">= ", min);
  if (min == -infinity) return cat("a number <= ", max);
  return cat("a number from ", min, " to ", max);
}

}  // namespace

void Context::attempt(const std::function<void()>& read) {
  try {
    read();
  } catch (const Reported&) {
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    problems.push_back(error.what());
  }
}

void Context::raise() const {
  constexpr std::size_t most = 30;
  if (problems.empty()) return;
  if (problems.size() == 1) fail(ErrorKind::config, problems.front());
  std::string all;
  for (std::size_t i = 0; i < std::min(most, problems.size()); ++i) all += "\n" + problems[i];
  if (problems.size() > most) all += cat("\nand ", problems.size() - most, " more");
  fail(ErrorKind::config, "the configuration has ", problems.size(), " problems:", all);
}

void Value::expect(Node::Kind kind) const {
  if (!node.is(kind)) {
    const std::string subject = path.empty() ? cat("the file must hold ") : cat(path, ": must be ");
    fail(ErrorKind::config, node.place.str(), ": ", subject, name_of(kind), ", not ", node.brief());
  }
}

bool Value::boolean() const {
  if (!node.is(Node::Kind::boolean)) error("must be true or false, not ", node.brief());
  return node.boolean;
}

std::int64_t Value::integer(std::int64_t min, std::int64_t max) const {
  std::int64_t value = node.integer;
  bool good = node.is(Node::Kind::integer);
  if (node.is(Node::Kind::number) && std::abs(node.number) < 0x1p63 && node.number == std::floor(node.number))
    value = static_cast<std::int64_t>(node.number), good = true;
  if (good && value >= min && value <= max) return value;
  if (min == std::numeric_limits<std::int64_t>::min()) error("must be an integer, not ", node.brief());
  if (max == int64_max || max == std::numeric_limits<int>::max())
    error("must be an integer >= ", min, ", not ", node.brief());
  error("must be an integer from ", min, " to ", max, ", not ", node.brief());
}

double Value::real(double min, double max, bool open_min) const {
  const bool number = node.is(Node::Kind::integer) || node.is(Node::Kind::number);
  const double value = node.number;
  if (number && std::isfinite(value) && value <= max && (open_min ? value > min : value >= min)) return value;
  const bool list = node.is(Node::Kind::array);
  error("must be ", range_of(min, max, open_min), ", not ", node.brief(),
        list ? "; one value serves all parameters here" : "");
}

const std::string& Value::text() const {
  if (!node.is(Node::Kind::string)) error("must be a string, not ", node.brief());
  return node.text;
}

std::size_t Value::choice(const std::vector<std::string>& names, const Synonyms& meant) const {
  const std::string& word = text();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (same_word(word, names[i])) return i;
  const auto known = std::find_if(meant.begin(), meant.end(),
                                  [&](const auto& entry) { return same_word(word, entry.first); });
  error(node.brief(), " is none of ", list_of(names), "; did you mean \"",
        known != meant.end() ? known->second : nearest(word, names), "\"?");
}

void unknown_key(const Value& section, const std::string& name, const Node& value,
                 const std::vector<std::string>& known) {
  const std::string path = join(section.path, name), close = nearest(name, known);
  const std::size_t distance = edit_distance(name, close);
  std::string hint =
      known.empty() ? std::string("this section takes no keys") : cat("did you mean \"", close, "\"?");
  if (distance > std::max<std::size_t>(2, name.size() / 3)) {
    const std::string home = homes_of(name);
    if (!home.empty())
      hint = cat("did you mean \"", home, "\"?");
    else if (!known.empty() && known.size() <= 24)
      hint = cat("the nearest is \"", close, "\"; this section knows ", list_of(known));
    else if (!known.empty() && distance + 1 >= std::max(name.size(), close.size()))
      hint = "no key of this section is like it";
  }
  fail(ErrorKind::config, value.place.str(), ": unknown key \"", path, "\"; ", hint);
}

void given_twice(const Value& value, const std::string& other) {
  value.error("means the same as \"", other, "\", which is given too; remove one of the two");
}

bool handle_auto(Auto rule, const Value& value) {
  if (rule == Auto::is_a_value || !value.node.is_text("auto")) return false;
  if (rule == Auto::needs_caller)
    value.error("\"auto\" is what transformers' Trainer fills in from its own arguments, of which Sherd knows nothing; give a "
                "value here or with --set ", value.path, "=VALUE");
  value.note("\"auto\" takes the default");
  return true;
}

bool is_false(const Value& value) {
  return !value.boolean();
}

bool is_empty(const Value& value) {
  const Node& node = value.node;
  return node.is_text("") || (node.is(Node::Kind::array) && node.items.empty()) ||
         (node.is(Node::Kind::object) && node.members.empty());
}

std::function<bool(const Value&)> equals_number(double number) {
  return [number](const Value& value) { return value.real() == number; };
}

bool never(const Value&) {
  return false;
}

void check_holds(Holds holds, const Value& value) {
  switch (holds) {
    case Holds::boolean:
      value.boolean();
      break;
    case Holds::count:
      value.integer(0);
      break;
    case Holds::real:
      value.real();
      break;
    case Holds::text:
      value.text();
      break;
    case Holds::anything:
      break;
  }
}

}  // namespace sherd::config
