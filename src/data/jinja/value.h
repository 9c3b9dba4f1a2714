#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace sherd::data::jinja {

class Value;
using List = std::vector<Value>;
/// In the order of insertion, as Python's. Keys are few.
using Dict = std::vector<std::pair<Value, Value>>;

/// The arguments of a call, which a function takes by position or name.
class Arguments {
 public:
  explicit Arguments(List positional = {}, std::vector<std::pair<std::string, Value>> named = {});
  /// The next one by position, or the one of that name; null: not given.
  const Value* take(const std::string& name);
  /// Throws where it is not given.
  const Value& require(const std::string& name);
  /// All that are left by position.
  List rest();
  /// All that are left by name.
  std::vector<std::pair<std::string, Value>> rest_by_name();
  /// Throws where arguments are left that nobody took; `what` was called.
  void done(const std::string& what) const;

 private:
  List positional_;
  std::vector<std::pair<std::string, Value>> named_;
  std::size_t next_ = 0;
};
using Function = std::function<Value(Arguments& arguments)>;

/// A name that nothing has: it writes nothing, and is false.
struct Undefined {
  std::string name;
};
struct None {};

/// A value of the language, with Python's meaning. Lists, dictionaries and functions are shared by copies.
/// Texts are UTF-8, and their characters are counted.
class Value {
 public:
  struct Sequence {
    List items;
    bool tuple = false;  ///< written in parentheses
  };
  /// Dictionaries, and namespaces, whose attributes a template sets.
  struct Mapping {
    Dict items;
    bool is_namespace = false;
  };

  Value() : value_(Undefined{}) {}
  Value(Undefined undefined) : value_(std::move(undefined)) {}  // NOLINT(google-explicit-constructor)
  Value(None none) : value_(none) {}                            // NOLINT(google-explicit-constructor)
  Value(bool value) : value_(value) {}                          // NOLINT(google-explicit-constructor)
  Value(std::int64_t value) : value_(value) {}                  // NOLINT(google-explicit-constructor)
  Value(double value) : value_(value) {}                        // NOLINT(google-explicit-constructor)
  Value(std::string value) : value_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Value(std::string_view value) : Value(std::string(value)) {}  // NOLINT(google-explicit-constructor)
  Value(const char* value) : Value(std::string(value)) {}       // NOLINT(google-explicit-constructor)
  static Value list(List items, bool tuple = false);
  static Value dict(Dict items, bool is_namespace = false);
  static Value function(Function function);

  bool is_undefined() const { return std::holds_alternative<Undefined>(value_); }
  bool is_none() const { return std::holds_alternative<None>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const { return std::holds_alternative<std::int64_t>(value_); }
  bool is_float() const { return std::holds_alternative<double>(value_); }
  /// A boolean is one, too.
  bool is_number() const { return is_bool() || is_integer() || is_float(); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_list() const { return std::holds_alternative<std::shared_ptr<Sequence>>(value_); }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<Mapping>>(value_); }
  bool is_function() const { return std::holds_alternative<std::shared_ptr<Function>>(value_); }

  bool boolean() const { return std::get<bool>(value_); }
  const std::string& text() const { return std::get<std::string>(value_); }
  const Undefined& undefined() const { return std::get<Undefined>(value_); }
  const Sequence& sequence() const { return *std::get<std::shared_ptr<Sequence>>(value_); }
  Mapping& mapping() const { return *std::get<std::shared_ptr<Mapping>>(value_); }
  const Function& function() const { return *std::get<std::shared_ptr<Function>>(value_); }
  /// The value of an integer, and of any number (booleans are 0 and 1); they throw for others.
  std::int64_t integer() const;
  double number() const;

  bool is_true() const;
  /// The name of its type in errors: "a string".
  std::string kind() const;
  /// As it is written: Python's str().
  std::string str() const;
  /// Python's repr().
  std::string repr() const;
  /// Python's json.dumps().
  struct JsonStyle {
    std::int64_t indent = -1;  ///< below 0: on one line
    bool ascii = false;        ///< other characters by their numbers
    bool sorted = false;       ///< by key
    std::string between = ", ", behind_key = ": ";
  };
  std::string json(const JsonStyle& style) const;
  /// The item of a dictionary with that key; null: none.
  const Value* find(const Value& key) const;
  /// The items of a list, the keys of a dictionary, the characters of a text; none for an undefined value.
  /// Throws for others.
  List items() const;

 private:
  std::variant<Undefined, None, bool, std::int64_t, double, std::string, std::shared_ptr<Sequence>,
               std::shared_ptr<Mapping>, std::shared_ptr<Function>>
      value_;
};

bool equal(const Value& a, const Value& b);
/// Throws where they have no order.
bool less(const Value& a, const Value& b);
bool contains(const Value& within, const Value& item);

/// The characters of a text.
std::vector<std::string_view> characters(std::string_view text);
/// Items [from, to) with a step, as Python has them, of a text or a list; not given: its ends.
Value slice(const Value& of, std::optional<std::int64_t> from, std::optional<std::int64_t> to,
            std::optional<std::int64_t> step);

/// Throws Error{data} with that text, to which whoever runs the template adds the line.
[[noreturn]] void template_error(const std::string& what);

}  // namespace sherd::data::jinja
