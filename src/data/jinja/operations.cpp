#include "data/jinja/operations.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "data/jinja/run.h"

namespace sherd::data::jinja {
namespace {

std::int64_t checked(bool overflows, std::int64_t value) {
  if (overflows) template_error("an integer is beyond 64 bits");
  return value;
}

Value add(const Value& a, const Value& b) {
  if (a.is_string() && b.is_string()) {
    if (a.text().size() + b.text().size() > most_text) template_error("a text has more than 256 MiB");
    return a.text() + b.text();
  }
  if (a.is_list() && b.is_list()) {
    List items = a.items();
    const List more = b.items();
    if (items.size() + more.size() > most_text / sizeof(Value)) template_error("a list grows beyond any use");
    items.insert(items.end(), more.begin(), more.end());
    return Value::list(std::move(items), a.sequence().tuple);
  }
  if (!a.is_number() || !b.is_number()) template_error(cat("+ does not take ", a.kind(), " and ", b.kind()));
  if (a.is_float() || b.is_float()) return a.number() + b.number();
  std::int64_t sum = 0;
  const bool overflows = __builtin_add_overflow(a.integer(), b.integer(), &sum);
  return checked(overflows, sum);
}

Value multiply(const Value& a, const Value& b) {
  if ((b.is_string() || b.is_list()) && a.is_number()) return multiply(b, a);
  if (a.is_list() && b.is_number()) {
    List out;
    for (std::int64_t i = 0; i < b.integer(); ++i) {
      if (out.size() > most_text / sizeof(Value)) template_error("a list is repeated beyond any use");
      out.insert(out.end(), a.sequence().items.begin(), a.sequence().items.end());
    }
    return Value::list(std::move(out), a.sequence().tuple);
  }
  if (a.is_string() && b.is_number()) {
    const std::int64_t times = std::max<std::int64_t>(0, b.integer());
    if (static_cast<std::size_t>(times) > most_text / std::max<std::size_t>(1, a.text().size()))
      template_error("a text is repeated beyond 256 MiB");
    std::string out;
    for (std::int64_t i = 0; i < times; ++i) out += a.text();
    return out;
  }
  if (a.is_float() || b.is_float()) return a.number() * b.number();
  std::int64_t product = 0;
  const bool overflows = __builtin_mul_overflow(a.integer(), b.integer(), &product);
  return checked(overflows, product);
}

}  // namespace

Value calculated(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "+") return add(a, b);
  if (sign == "*") return multiply(a, b);
  const bool real = a.is_float() || b.is_float();
  const double x = a.number(), y = b.number();
  if (sign == "-") {
    if (real) return x - y;
    std::int64_t out = 0;
    const bool overflows = __builtin_sub_overflow(a.integer(), b.integer(), &out);
    return checked(overflows, out);
  }
  if (sign == "**") {
    const double power = std::pow(x, y);
    if (real || b.integer() < 0) return power;
    if (std::abs(power) > 9e15) template_error("an integer is beyond 64 bits");
    return static_cast<std::int64_t>(std::llround(power));
  }
  if (y == 0) template_error("division by zero");
  if (sign == "/") return x / y;
  if (real) return sign == "//" ? std::floor(x / y) : x - y * std::floor(x / y);
  const std::int64_t n = a.integer(), d = b.integer();
  if (d == -1) return sign == "//" ? calculated("-", std::int64_t{0}, a) : Value(std::int64_t{0});
  const std::int64_t quotient = n / d - (n % d != 0 && (n < 0) != (d < 0) ? 1 : 0);
  return sign == "//" ? quotient : n - quotient * d;
}

bool compared(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "==") return equal(a, b);
  if (sign == "!=") return !equal(a, b);
  if (sign == "in") return contains(b, a);
  if (sign == "not in") return !contains(b, a);
  if (sign == "<") return less(a, b);
  if (sign == ">") return less(b, a);
  return sign == "<=" ? !less(b, a) : !less(a, b);
}

Value loop_of(const List& items, std::size_t index) {
  const auto at = static_cast<std::int64_t>(index), size = static_cast<std::int64_t>(items.size());
  const auto cycle = [at](Arguments& arguments) {
    const List all = arguments.rest();
    if (all.empty()) template_error("loop.cycle() takes what it is to go through");
    return all[static_cast<std::size_t>(at) % all.size()];
  };
  return Value::dict(
      {{"index", at + 1},
       {"index0", at},
       {"revindex", size - at},
       {"revindex0", size - at - 1},
       {"first", at == 0},
       {"last", at + 1 == size},
       {"length", size},
       {"depth", std::int64_t{1}},
       {"depth0", std::int64_t{0}},
       {"previtem", index == 0 ? Value(Undefined{"loop.previtem"}) : items[index - 1]},
       {"nextitem", index + 1 == items.size() ? Value(Undefined{"loop.nextitem"}) : items[index + 1]},
       {"cycle", Value::function(cycle)}},
      true);
}

}  // namespace sherd::data::jinja
