#include "data/jinja/value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data::jinja {

void template_error(const std::string& what) {
  throw Error(ErrorKind::data, what);
}

Arguments::Arguments(List positional, std::vector<std::pair<std::string, Value>> named)
    : positional_(std::move(positional)), named_(std::move(named)) {}

const Value* Arguments::take(const std::string& name) {
  if (next_ < positional_.size()) return &positional_[next_++];
  for (auto& [key, value] : named_)
    if (key == name) {
      key.clear();  // taken
      return &value;
    }
  return nullptr;
}

const Value& Arguments::require(const std::string& name) {
  const Value* found = take(name);
  if (!found) template_error(cat("the argument '", name, "' is missing"));
  return *found;
}

List Arguments::rest() {
  List out(positional_.begin() + static_cast<std::ptrdiff_t>(next_), positional_.end());
  next_ = positional_.size();
  return out;
}

std::vector<std::pair<std::string, Value>> Arguments::rest_by_name() {
  std::erase_if(named_, [](const auto& named) { return named.first.empty(); });
  return std::exchange(named_, {});
}

void Arguments::done(const std::string& what) const {
  if (next_ < positional_.size()) template_error(cat(what, " takes fewer arguments"));
  for (const auto& [key, value] : named_)
    if (!key.empty()) template_error(cat(what, " has no argument '", key, "'"));
}

Value Value::list(List items, bool tuple) {
  Value out;
  out.value_ = std::make_shared<Sequence>(Sequence{std::move(items), tuple});
  return out;
}
Value Value::dict(Dict items, bool is_namespace) {
  Value out;
  out.value_ = std::make_shared<Mapping>(Mapping{std::move(items), is_namespace});
  return out;
}
Value Value::function(Function function) {
  Value out;
  out.value_ = std::make_shared<Function>(std::move(function));
  return out;
}

std::string Value::kind() const {
  static constexpr std::array names{"undefined", "none",   "a boolean",    "an integer", "a float",
                                    "a string",  "a list", "a dictionary", "a function"};
  if (is_undefined()) return cat("'", undefined().name, "', which is undefined");
  return names[value_.index()];
}

std::int64_t Value::integer() const {
  if (is_integer()) return std::get<std::int64_t>(value_);
  if (is_bool()) return boolean() ? 1 : 0;
  template_error(cat("an integer is needed, not ", kind()));
}

double Value::number() const {
  if (is_float()) return std::get<double>(value_);
  if (is_number()) return static_cast<double>(integer());
  template_error(cat("a number is needed, not ", kind()));
}

bool Value::is_true() const {
  if (is_bool()) return boolean();
  if (is_integer()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_string()) return !text().empty();
  if (is_list()) return !sequence().items.empty();
  if (is_dict()) return mapping().is_namespace || !mapping().items.empty();
  return is_function();
}

namespace {

/// Python's repr() of a float: the shortest digits that mean it.
std::string of_double(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 32> digits{};
  const double size = std::abs(value);
  const bool scientific = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value,
                                 scientific ? std::chars_format::scientific : std::chars_format::fixed)
                       .ptr;
  std::string out(digits.data(), end);
  return scientific || out.find('.') != std::string::npos ? out : out + ".0";
}

std::string hex_escape(unsigned char c) {
  constexpr const char* digits = "0123456789abcdef";
  return {digits[c >> 4], digits[c & 15]};
}

std::string quoted(const std::string& text) {
  const bool doubled = text.find('\'') != std::string::npos && text.find('"') == std::string::npos;
  const char quote = doubled ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    if (c == '\n')
      out += "\\n";
    else if (c == '\r')
      out += "\\r";
    else if (c == '\t')
      out += "\\t";
    else if (c == '\\' || c == quote)
      out += cat('\\', c);
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += "\\x" + hex_escape(static_cast<unsigned char>(c));
    else
      out += c;
  }
  return out + quote;
}

std::string json_text(const std::string& text, bool ascii) {
  std::string out = "\"";
  const auto number = [&out](unsigned unit) {
    out += "\\u" + hex_escape(static_cast<unsigned char>(unit >> 8)) +
           hex_escape(static_cast<unsigned char>(unit & 0xff));
  };
  std::string storage;
  for (const std::string_view c : characters(valid_utf8(text, storage))) {
    const char32_t character = first_character(c);
    constexpr std::string_view plain = "\n\r\t\b\f\\\"", names = "nrtbf\\\"";
    if (const std::size_t at = plain.find(c); c.size() == 1 && at != std::string_view::npos)
      out += cat('\\', names[at]);
    else if (character >= 0xFDD0 && character <= 0xFDEF)
      out += c;  // noncharacters, which whoever runs a template may put there as marks
    else if (character < 0x20 || (ascii && character >= 0x80 && character < 0x10000))
      number(static_cast<unsigned>(character));
    else if (ascii && character >= 0x10000)
      number(0xD800 + ((static_cast<unsigned>(character) - 0x10000) >> 10)),
          number(0xDC00 + ((static_cast<unsigned>(character) - 0x10000) & 0x3ff));
    else
      out += c;
  }
  return out + "\"";
}

/// Parts between brackets, each on a line of its own where there is an indent.
std::string in_brackets(const std::vector<std::string>& parts, const char* brackets,
                        const Value::JsonStyle& style, std::int64_t depth) {
  if (parts.empty()) return brackets;
  const auto line = [&](std::int64_t at) {
    return style.indent < 0 ? std::string()
                            : "\n" + std::string(static_cast<std::size_t>(style.indent * at), ' ');
  };
  std::string between = style.between;  // without its space in front of a line's end
  while (style.indent >= 0 && between == ", ") between.pop_back();
  return cat(brackets[0], line(depth + 1), joined_text(parts, between + line(depth + 1)), line(depth),
             brackets[1]);
}

constexpr std::int64_t most_depth = 100;

std::string json_of(const Value& value, const Value::JsonStyle& style, std::int64_t depth) {
  if (depth > most_depth) template_error("a value lies in more than 100 others");
  if (value.is_none()) return "null";
  if (value.is_bool()) return value.boolean() ? "true" : "false";
  if (value.is_integer()) return std::to_string(value.integer());
  if (value.is_float()) {
    const double number = value.number();
    if (std::isnan(number)) return "NaN";
    return std::isinf(number) ? (number < 0 ? "-Infinity" : "Infinity") : of_double(number);
  }
  if (value.is_string()) return json_text(value.text(), style.ascii);
  std::vector<std::string> parts;
  if (value.is_list()) {
    for (const Value& item : value.sequence().items) parts.push_back(json_of(item, style, depth + 1));
    return in_brackets(parts, "[]", style, depth);
  }
  if (!value.is_dict()) template_error(cat("there is no JSON of ", value.kind()));
  Dict items = value.mapping().items;
  if (style.sorted)
    std::stable_sort(items.begin(), items.end(),
                     [](const auto& a, const auto& b) { return less(a.first, b.first); });
  for (const auto& [key, item] : items)
    parts.push_back(cat(json_text(key.is_string() ? key.text() : json_of(key, {}, depth + 1), style.ascii),
                        style.behind_key, json_of(item, style, depth + 1)));
  return in_brackets(parts, "{}", style, depth);
}

}  // namespace

std::string Value::str() const {
  if (is_undefined()) return {};
  return is_string() ? text() : repr();
}

std::string Value::repr() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "None";
  if (is_bool()) return boolean() ? "True" : "False";
  if (is_integer()) return std::to_string(integer());
  if (is_float()) return of_double(number());
  if (is_string()) return quoted(text());
  if (is_function()) return "<function>";
  if (is_list()) {
    const std::string out = joined_text(sequence().items, ", ", &Value::repr);
    if (!sequence().tuple) return "[" + out + "]";
    return "(" + out + (sequence().items.size() == 1 ? ",)" : ")");
  }
  const auto pair = [](const auto& entry) { return cat(entry.first.repr(), ": ", entry.second.repr()); };
  return cat("{", joined_text(mapping().items, ", ", pair), "}");
}

std::string Value::json(const JsonStyle& style) const {
  return json_of(*this, style, 0);
}

const Value* Value::find(const Value& key) const {
  for (const auto& [own, item] : mapping().items)
    if (equal(own, key)) return &item;
  return nullptr;
}

List Value::items() const {
  if (is_list()) return sequence().items;
  List out;
  if (is_dict()) {
    for (const auto& [key, item] : mapping().items) out.push_back(key);
  } else if (is_string()) {
    for (const std::string_view c : characters(text())) out.emplace_back(c);
  } else if (!is_undefined()) {
    template_error(cat(kind(), " has no items"));
  }
  return out;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.is_float() || b.is_float() ? a.number() == b.number() : a.integer() == b.integer();
  if (a.is_string() && b.is_string()) return a.text() == b.text();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.is_list() && b.is_list())
    return a.sequence().tuple == b.sequence().tuple &&
           std::equal(a.sequence().items.begin(), a.sequence().items.end(), b.sequence().items.begin(),
                      b.sequence().items.end(), equal);
  if (a.is_dict() && b.is_dict()) {
    const Dict &one = a.mapping().items, &other = b.mapping().items;
    return one.size() == other.size() && std::all_of(one.begin(), one.end(), [&](const auto& item) {
             const Value* found = b.find(item.first);
             return found && equal(*found, item.second);
           });
  }
  return a.is_function() && b.is_function() && &a.function() == &b.function();
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.is_float() || b.is_float() ? a.number() < b.number() : a.integer() < b.integer();
  if (a.is_string() && b.is_string()) return a.text() < b.text();
  if (a.is_list() && b.is_list())
    return std::lexicographical_compare(a.sequence().items.begin(), a.sequence().items.end(),
                                        b.sequence().items.begin(), b.sequence().items.end(), less);
  template_error(cat(a.kind(), " and ", b.kind(), " have no order"));
}

bool contains(const Value& within, const Value& item) {
  if (within.is_string()) {
    if (!item.is_string()) template_error(cat("a string holds no ", item.kind()));
    return within.text().find(item.text()) != std::string::npos;
  }
  const List items = within.items();
  return std::any_of(items.begin(), items.end(), [&](const Value& own) { return equal(own, item); });
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = std::max<std::size_t>(1, utf8_length(text.substr(at)));
    out.push_back(text.substr(at, size));
    at += size;
  }
  return out;
}

Value slice(const Value& of, std::optional<std::int64_t> from, std::optional<std::int64_t> to,
            std::optional<std::int64_t> step) {
  if (!of.is_string() && !of.is_list()) template_error(cat(of.kind(), " has no slices"));
  const std::int64_t by = step.value_or(1);
  if (by == 0) template_error("a slice has a step of 0");
  const List items = of.items();
  const auto size = static_cast<std::int64_t>(items.size());
  const auto place = [&](std::optional<std::int64_t> at, std::int64_t otherwise) {
    if (!at) return otherwise;
    const std::int64_t least = by < 0 ? -1 : 0, most = by < 0 ? size - 1 : size;
    return std::clamp(*at < 0 ? *at + size : *at, least, most);
  };
  const std::int64_t first = place(from, by < 0 ? size - 1 : 0), end = place(to, by < 0 ? -1 : size);
  List out;
  for (std::int64_t i = first; by > 0 ? i < end : i > end; i += by)
    out.push_back(items[static_cast<std::size_t>(i)]);
  if (of.is_list()) return Value::list(std::move(out), of.sequence().tuple);
  std::string text;
  for (const Value& c : out) text += c.text();
  return text;
}

}  // namespace sherd::data::jinja
