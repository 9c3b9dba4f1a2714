#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/jinja/builtins.h"
#include "data/jinja/texts.h"

namespace sherd::data::jinja {

List pairs_of(const Value& value) {
  List out;
  if (value.is_undefined()) return out;
  if (!value.is_dict()) template_error(cat("pairs are a dictionary's, not of ", value.kind()));
  for (const auto& [key, item] : value.mapping().items) out.push_back(Value::list({key, item}, true));
  return out;
}

namespace {

/// The value at "a.b.0" of another.
Value at_path(const Value& of, const std::string& path) {
  Value value = of;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    const bool number = !key.empty() && key.find_first_not_of("0123456789") == std::string::npos;
    value = attribute(value, number ? Value(static_cast<std::int64_t>(std::stoll(key))) : Value(key));
    begin = end + 1;
  }
  return value;
}

Value key_of(const Value& item, const Value* path) {
  return path && !path->is_none() ? at_path(item, path->str()) : item;
}

/// In lower case, unless that counts.
Value folded(const Value& value, bool case_counts) {
  return value.is_string() && !case_counts ? Value(lower(value.text())) : value;
}

List sorted(List items, const Value* path, bool reverse, bool case_counts) {
  const auto before = [&](const Value& a, const Value& b) {
    const Value one = folded(key_of(a, path), case_counts), other = folded(key_of(b, path), case_counts);
    return reverse ? less(other, one) : less(one, other);
  };
  std::stable_sort(items.begin(), items.end(), before);
  return items;
}

/// select, reject, selectattr and rejectattr.
Value selected(const Value& value, Arguments& arguments, bool by_attribute, bool keeps) {
  const std::string path = by_attribute ? arguments.require("attribute").str() : "";
  const Value* name = arguments.take("test");
  const std::string which = name ? text_of(*name, "a test's name") : "";
  const List rest = arguments.rest();
  List out;
  for (const Value& item : value.items()) {
    const Value of = by_attribute ? at_path(item, path) : item;
    Arguments given(rest);
    if ((which.empty() ? of.is_true() : test(which, of, given)) == keeps) out.push_back(item);
  }
  return Value::list(std::move(out));
}

Value mapped(const Value& value, Arguments& arguments) {
  List out;
  auto named = arguments.rest_by_name();
  const auto by_name = [&](const char* name) -> const Value* {
    for (const auto& [key, given] : named)
      if (key == name) return &given;
    return nullptr;
  };
  const Value *path = by_name("attribute"), *otherwise = by_name("default");
  if (path) {
    for (const Value& item : value.items()) {
      Value found = at_path(item, path->str());
      out.push_back(found.is_undefined() && otherwise ? *otherwise : found);
    }
    return Value::list(std::move(out));
  }
  List rest = arguments.rest();
  if (rest.empty()) template_error("the filter map takes an attribute or the name of a filter");
  const std::string which = text_of(rest[0], "the filter map");
  rest.erase(rest.begin());
  for (const Value& item : value.items()) {
    Arguments given(rest, named);
    out.push_back(filter(which, item, given));
  }
  return Value::list(std::move(out));
}

Value unique(const Value& value, Arguments& arguments) {
  const Value *counts = arguments.take("case_sensitive"), *path = arguments.take("attribute");
  const bool case_counts = counts && counts->is_true();
  List out, seen;
  for (const Value& item : value.items()) {
    const Value key = folded(key_of(item, path), case_counts);
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& own) { return equal(own, key); })) continue;
    seen.push_back(key), out.push_back(item);
  }
  return Value::list(std::move(out));
}

Value grouped(const Value& value, Arguments& arguments) {
  const Value* path = &arguments.require("attribute");
  List out;
  for (const Value& item : sorted(value.items(), path, false, false)) {
    const Value key = key_of(item, path);
    if (out.empty() || !equal(folded(out.back().sequence().items[0], false), folded(key, false)))
      out.push_back(Value::list({key, Value::list({})}, true));
    List group = out.back().sequence().items[1].items();
    group.push_back(item);
    out.back() = Value::list({out.back().sequence().items[0], Value::list(std::move(group))}, true);
  }
  return Value::list(std::move(out));
}

Value extreme(const Value& value, Arguments& arguments, bool largest) {
  const Value *counts = arguments.take("case_sensitive"), *path = arguments.take("attribute");
  const List all = sorted(value.items(), path, largest, counts && counts->is_true());
  return all.empty() ? Value() : all.front();
}

std::string indented(const std::string& text, Arguments& arguments) {
  const Value *width = arguments.take("width"), *first = arguments.take("first"),
              *blank = arguments.take("blank");
  const std::string by =
      width && width->is_string()
          ? width->text()
          : std::string(
                static_cast<std::size_t>(std::clamp<std::int64_t>(width ? width->integer() : 4, 0, 1000)),
                ' ');
  std::string out;
  bool is_first = true;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const bool indents = is_first ? first && first->is_true() : !line.empty() || (blank && blank->is_true());
    out += (is_first ? "" : "\n") + (indents ? by : "") + line;
    is_first = false;
    if (end == text.size()) return out;
    begin = end + 1;
  }
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    out += c == '&'    ? "&amp;"
           : c == '<'  ? "&lt;"
           : c == '>'  ? "&gt;"
           : c == '"'  ? "&#34;"
           : c == '\'' ? "&#39;"
                       : std::string(1, c);
  return out;
}

Value as_integer(const Value& value, const Value& otherwise) {
  if (value.is_float() && std::abs(value.number()) < 9e18) return static_cast<std::int64_t>(value.number());
  if (value.is_number() && !value.is_float()) return value.integer();
  if (!value.is_string()) return otherwise;
  const std::string text = stripped(value.text(), nullptr, true, true);
  std::int64_t out = 0;
  const char* first = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(first, text.data() + text.size(), out);
  if (error == std::errc() && end == text.data() + text.size()) return out;
  double real = 0;
  const auto [stop, wrong] = std::from_chars(first, text.data() + text.size(), real);
  if (wrong == std::errc() && stop == text.data() + text.size() && std::abs(real) < 9e18)
    return static_cast<std::int64_t>(real);
  return otherwise;
}

Value as_float(const Value& value, const Value& otherwise) {
  if (value.is_number()) return value.number();
  if (!value.is_string()) return otherwise;
  const std::string text = stripped(value.text(), nullptr, true, true);
  double out = 0;
  const char* first = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(first, text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() ? Value(out) : otherwise;
}

Value rounded(const Value& value, Arguments& arguments) {
  const Value *digits = arguments.take("precision"), *way = arguments.take("method");
  const double scale = std::pow(10.0, static_cast<double>(digits ? digits->integer() : 0));
  const double scaled = value.number() * scale;
  const std::string how = way ? way->str() : "common";
  const double out = how == "ceil"    ? std::ceil(scaled)
                     : how == "floor" ? std::floor(scaled)
                                      : std::nearbyint(scaled);
  return out / scale;
}

using Filter = Value (*)(const Value& value, Arguments& arguments);

const std::map<std::string, Filter>& filters() {
  using V = const Value&;
  using A = Arguments&;
  static const Filter length = [](V v, A) {
    return Value(static_cast<std::int64_t>(v.is_dict() ? v.mapping().items.size() : v.items().size()));
  };
  static const Filter otherwise = [](V v, A a) {
    const Value *value = a.take("default_value"), *falsy = a.take("boolean");
    const bool missing = v.is_undefined() || (falsy && falsy->is_true() && !v.is_true());
    return missing ? (value ? *value : Value("")) : v;
  };
  static const std::map<std::string, Filter> all{
      {"length", length},
      {"count", length},
      {"default", otherwise},
      {"d", otherwise},
      {"trim", [](V v, A a) { return Value(stripped(v.str(), a.take("chars"), true, true)); }},
      {"string", [](V v, A) { return Value(v.str()); }},
      {"safe", [](V v, A) { return v; }},
      {"escape", [](V v, A) { return Value(escaped(v.str())); }},
      {"e", [](V v, A) { return Value(escaped(v.str())); }},
      {"lower", [](V v, A) { return Value(lower(v.str())); }},
      {"upper", [](V v, A) { return Value(upper(v.str())); }},
      {"title", [](V v, A) { return Value(titled(v.str(), false)); }},
      {"capitalize", [](V v, A) { return Value(titled(v.str(), true)); }},
      {"replace",
       [](V v, A a) {
         const std::string from = a.require("old").str(), to = a.require("new").str();
         return Value(replaced(v.str(), from, to, limit_of(a, "count")));
       }},
      {"indent", [](V v, A a) { return Value(indented(v.str(), a)); }},
      {"join",
       [](V v, A a) {
         const Value *by = a.take("d"), *path = a.take("attribute");
         List items = v.items();
         for (Value& item : items) item = key_of(item, path);
         return Value(joined(Value::list(std::move(items)), by ? by->str() : ""));
       }},
      {"tojson",
       [](V v, A a) {
         const Value *ascii = a.take("ensure_ascii"), *indent = a.take("indent"),
                     *separators = a.take("separators"), *sorted = a.take("sort_keys");
         Value::JsonStyle style;
         if (indent && !indent->is_none()) style.indent = std::clamp<std::int64_t>(indent->integer(), 0, 100);
         if (separators && !separators->is_none())
           style.between = attribute(*separators, std::int64_t{0}).str(),
           style.behind_key = attribute(*separators, std::int64_t{1}).str();
         style.ascii = ascii && ascii->is_true(), style.sorted = sorted && sorted->is_true();
         return Value(v.json(style));
       }},
      {"list", [](V v, A) { return Value::list(v.items()); }},
      {"first",
       [](V v, A) {
         const List all = v.items();
         return all.empty() ? Value(Undefined{"the first item"}) : all.front();
       }},
      {"last",
       [](V v, A) {
         const List all = v.items();
         return all.empty() ? Value(Undefined{"the last item"}) : all.back();
       }},
      {"reverse",
       [](V v, A) {
         if (v.is_string()) return slice(v, {}, {}, -1);
         List items = v.items();
         std::reverse(items.begin(), items.end());
         return Value::list(std::move(items));
       }},
      {"sort",
       [](V v, A a) {
         const Value *reverse = a.take("reverse"), *counts = a.take("case_sensitive"),
                     *path = a.take("attribute");
         return Value::list(
             sorted(v.items(), path, reverse && reverse->is_true(), counts && counts->is_true()));
       }},
      {"unique", unique},
      {"groupby", grouped},
      {"select", [](V v, A a) { return selected(v, a, false, true); }},
      {"reject", [](V v, A a) { return selected(v, a, false, false); }},
      {"selectattr", [](V v, A a) { return selected(v, a, true, true); }},
      {"rejectattr", [](V v, A a) { return selected(v, a, true, false); }},
      {"map", mapped},
      {"items", [](V v, A) { return Value::list(pairs_of(v)); }},
      {"dictsort",
       [](V v, A a) {
         const Value *counts = a.take("case_sensitive"), *by = a.take("by"), *reverse = a.take("reverse");
         const Value place = std::int64_t{by && by->str() == "value" ? 1 : 0};
         return Value::list(
             sorted(pairs_of(v), &place, reverse && reverse->is_true(), counts && counts->is_true()));
       }},
      {"sum",
       [](V v, A a) {
         const Value *path = a.take("attribute"), *start = a.take("start");
         double sum = start ? start->number() : 0;
         bool whole = !start || !start->is_float();
         for (const Value& item : v.items()) {
           const Value key = key_of(item, path);
           sum += key.number(), whole = whole && !key.is_float();
         }
         return whole ? Value(static_cast<std::int64_t>(sum)) : Value(sum);
       }},
      {"min", [](V v, A a) { return extreme(v, a, false); }},
      {"max", [](V v, A a) { return extreme(v, a, true); }},
      {"abs",
       [](V v, A) { return v.is_float() ? Value(std::abs(v.number())) : Value(std::abs(v.integer())); }},
      {"round", rounded},
      {"int",
       [](V v, A a) {
         const Value* fallback = a.take("default");
         return as_integer(v, fallback ? *fallback : Value(std::int64_t{0}));
       }},
      {"float",
       [](V v, A a) {
         const Value* fallback = a.take("default");
         return as_float(v, fallback ? *fallback : Value(0.0));
       }},
      {"attr", [](V v, A a) { return attribute(v, a.require("name")); }}};
  return all;
}

}  // namespace

Value filter(const std::string& name, const Value& value, Arguments& arguments) {
  return function_of(filters(), "filter", name)(value, arguments);
}

}  // namespace sherd::data::jinja
