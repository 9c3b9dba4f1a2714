#include "data/jinja/builtins.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <map>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/jinja/texts.h"

namespace sherd::data::jinja {
namespace {

constexpr std::int64_t most_items = 1'000'000;

using Test = bool (*)(const Value& value, Arguments& arguments);

const std::map<std::string, Test>& tests() {
  using V = const Value&;
  using A = Arguments&;
  static const Test same = [](V v, A a) { return equal(v, a.require("other")); };
  static const Test other = [](V v, A a) { return !equal(v, a.require("other")); };
  static const Test below = [](V v, A a) { return less(v, a.require("other")); };
  static const Test above = [](V v, A a) { return less(a.require("other"), v); };
  static const Test at_most = [](V v, A a) { return !less(a.require("other"), v); };
  static const Test at_least = [](V v, A a) { return !less(v, a.require("other")); };
  static const std::map<std::string, Test> all{
      {"defined", [](V v, A) { return !v.is_undefined(); }},
      {"undefined", [](V v, A) { return v.is_undefined(); }},
      {"none", [](V v, A) { return v.is_none(); }},
      {"string", [](V v, A) { return v.is_string(); }},
      {"boolean", [](V v, A) { return v.is_bool(); }},
      {"true", [](V v, A) { return v.is_bool() && v.boolean(); }},
      {"false", [](V v, A) { return v.is_bool() && !v.boolean(); }},
      {"integer", [](V v, A) { return v.is_integer(); }},
      {"float", [](V v, A) { return v.is_float(); }},
      {"number", [](V v, A) { return v.is_number(); }},
      {"mapping", [](V v, A) { return v.is_dict() && !v.mapping().is_namespace; }},
      {"sequence",
       [](V v, A) { return v.is_string() || v.is_list() || (v.is_dict() && !v.mapping().is_namespace); }},
      {"iterable",
       [](V v, A) {
         return v.is_string() || v.is_list() || v.is_undefined() ||
                (v.is_dict() && !v.mapping().is_namespace);
       }},
      {"callable", [](V v, A) { return v.is_function(); }},
      {"sameas", same},
      {"eq", same},
      {"equalto", same},
      {"==", same},
      {"ne", other},
      {"!=", other},
      {"lt", below},
      {"lessthan", below},
      {"<", below},
      {"gt", above},
      {"greaterthan", above},
      {">", above},
      {"le", at_most},
      {"<=", at_most},
      {"ge", at_least},
      {">=", at_least},
      {"in", [](V v, A a) { return contains(a.require("seq"), v); }},
      {"odd", [](V v, A) { return v.integer() % 2 != 0; }},
      {"even", [](V v, A) { return v.integer() % 2 == 0; }},
      {"divisibleby",
       [](V v, A a) {
         const std::int64_t by = a.require("num").integer();
         if (by == 0) template_error("division by zero");
         return v.integer() % by == 0;
       }},
      {"lower", [](V v, A) { return v.str() == lower(v.str()) && v.str() != upper(v.str()); }},
      {"upper", [](V v, A) { return v.str() == upper(v.str()) && v.str() != lower(v.str()); }}};
  return all;
}

Value range(Arguments& arguments) {
  const List all = arguments.rest();
  if (all.empty() || all.size() > 3) template_error("range() takes one to three integers");
  const std::int64_t first = all.size() > 1 ? all[0].integer() : 0,
                     end = all[all.size() > 1 ? 1 : 0].integer(),
                     step = all.size() > 2 ? all[2].integer() : 1;
  if (step == 0) template_error("range() has a step of 0");
  List out;
  for (std::int64_t i = first; step > 0 ? i < end : i > end; i += step) {
    if (static_cast<std::int64_t>(out.size()) >= most_items)
      template_error("range() has more than a million items");
    out.emplace_back(i);
  }
  return Value::list(std::move(out));
}

Value dict_of(Arguments& arguments, bool is_namespace) {
  Dict items;
  for (const Value& given : arguments.rest())
    if (given.is_dict())
      items = given.mapping().items;
    else
      template_error(cat("a dictionary is made of names and values, or another one, not of ", given.kind()));
  for (auto& [name, value] : arguments.rest_by_name()) items.emplace_back(name, value);
  return Value::dict(std::move(items), is_namespace);
}

/// The date and time of this machine, as strftime() writes them.
Value strftime_now(Arguments& arguments) {
  const std::string& format = text_of(arguments.require("format"), "strftime_now()");
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 512> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), format.c_str(), &local);
  return std::string(text.data(), size);
}

}  // namespace

bool test(const std::string& name, const Value& value, Arguments& arguments) {
  return function_of(tests(), "test", name)(value, arguments);
}

Value method(const Value& of, const std::string& name) {
  if (of.is_string()) return text_method(of.text(), name);
  if (of.is_dict() && !of.mapping().is_namespace) {
    if (name == "items") return Value::function([of](Arguments&) { return Value::list(pairs_of(of)); });
    if (name == "keys") return Value::function([of](Arguments&) { return Value::list(of.items()); });
    if (name == "values")
      return Value::function([of](Arguments&) {
        List out;
        for (const auto& [key, item] : of.mapping().items) out.push_back(item);
        return Value::list(std::move(out));
      });
    if (name == "get")
      return Value::function([of](Arguments& arguments) {
        const Value key = arguments.require("key");
        const Value *otherwise = arguments.take("default"), *found = of.find(key);
        return found ? *found : otherwise ? *otherwise : Value(None{});
      });
  }
  if (of.is_list()) {
    if (name == "index")
      return Value::function([of](Arguments& arguments) {
        const Value& item = arguments.require("value");
        const List& all = of.sequence().items;
        for (std::size_t i = 0; i < all.size(); ++i)
          if (equal(all[i], item)) return Value(static_cast<std::int64_t>(i));
        template_error("index() finds no such item");
      });
    if (name == "count")
      return Value::function([of](Arguments& arguments) {
        const Value& item = arguments.require("value");
        const List& all = of.sequence().items;
        return Value(static_cast<std::int64_t>(
            std::count_if(all.begin(), all.end(), [&](const Value& own) { return equal(own, item); })));
      });
    if (name == "append" || name == "extend" || name == "insert" || name == "pop")
      template_error(cat("lists stay as they are: ", name, "() is not allowed, as in transformers"));
  }
  return {};
}

Value attribute(const Value& of, const Value& key) {
  if (of.is_undefined()) template_error(cat("'", of.undefined().name, "' is undefined"));
  if (of.is_dict()) {
    const Value* found = of.find(key);
    return found ? *found : Value(Undefined{key.str()});
  }
  if ((of.is_list() || of.is_string()) && key.is_number()) {
    const List all = of.items();
    const std::int64_t at = key.integer(), size = static_cast<std::int64_t>(all.size()),
                       index = at < 0 ? at + size : at;
    if (index < 0 || index >= size) return Undefined{cat("item ", at)};
    return all[static_cast<std::size_t>(index)];
  }
  // The pairs that groupby makes have names for their elements.
  if (of.is_list() && of.sequence().tuple && of.sequence().items.size() == 2 && key.is_string()) {
    if (key.text() == "grouper") return of.sequence().items[0];
    if (key.text() == "list") return of.sequence().items[1];
  }
  return Undefined{key.str()};
}

Value global(const std::string& name) {
  if (name == "range") return Value::function(range);
  if (name == "dict") return Value::function([](Arguments& arguments) { return dict_of(arguments, false); });
  if (name == "namespace")
    return Value::function([](Arguments& arguments) { return dict_of(arguments, true); });
  if (name == "strftime_now") return Value::function(strftime_now);
  if (name == "raise_exception")
    return Value::function(
        [](Arguments& arguments) -> Value { template_error(arguments.require("message").str()); });
  return Undefined{name};
}

}  // namespace sherd::data::jinja
