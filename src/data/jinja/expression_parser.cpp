#include "data/jinja/expression_parser.h"

#include <algorithm>
#include <optional>

#include "data/jinja/builtins.h"
#include "data/jinja/operations.h"

namespace sherd::data::jinja {
namespace {

Expression constant(Value value) {
  return [value = std::move(value)](Run&) { return value; };
}

}  // namespace

Expression list_of(std::vector<Expression> items, bool tuple) {
  return [items = std::move(items), tuple](Run& run) {
    List out;
    for (const Expression& item : items) out.push_back(item(run));
    return Value::list(std::move(out), tuple);
  };
}

Arguments CallSyntax::evaluate(Run& run) const {
  List positional;
  std::vector<std::pair<std::string, Value>> named;
  for (const One& one : all) {
    Value value = one.value(run);
    if (one.stars == 1)
      for (Value& item : value.items()) positional.push_back(std::move(item));
    else if (one.stars == 2 && value.is_dict())
      for (const auto& [key, item] : value.mapping().items) named.emplace_back(key.str(), item);
    else if (one.name.empty())
      positional.push_back(std::move(value));
    else
      named.emplace_back(one.name, std::move(value));
  }
  return Arguments(std::move(positional), std::move(named));
}

Expression ExpressionParser::expression() {
  const Deeper deeper(*this);
  Expression out = either();
  while (take_word("if")) {
    Expression condition = either(), otherwise;
    if (take_word("else")) otherwise = expression();
    out = [yes = std::move(out), condition = std::move(condition), no = std::move(otherwise)](Run& run) {
      if (condition(run).is_true()) return yes(run);
      return no ? no(run) : Value();
    };
  }
  return out;
}

Expression ExpressionParser::either() {
  Expression out = both();
  while (take_word("or"))
    out = [a = std::move(out), b = both()](Run& run) {
      Value first = a(run);
      return first.is_true() ? first : b(run);
    };
  return out;
}

Expression ExpressionParser::both() {
  Expression out = negation();
  while (take_word("and"))
    out = [a = std::move(out), b = negation()](Run& run) {
      Value first = a(run);
      return first.is_true() ? b(run) : first;
    };
  return out;
}

Expression ExpressionParser::negation() {
  const Deeper deeper(*this);
  if (!take_word("not")) return comparison();
  return [of = negation()](Run& run) { return Value(!of(run).is_true()); };
}

std::string ExpressionParser::comparing() {
  for (const char* sign : {"==", "!=", "<=", ">=", "<", ">"})
    if (take_sign(sign)) return sign;
  if (take_word("in")) return "in";
  if (is_word("not") && ahead().kind == Kind::name && ahead().text == "in") return at_ += 2, "not in";
  return {};
}

Expression ExpressionParser::comparison() {
  Expression first = sum();
  std::vector<std::pair<std::string, Expression>> more;
  for (std::string sign = comparing(); !sign.empty(); sign = comparing()) more.emplace_back(sign, sum());
  if (more.empty()) return first;
  return [first = std::move(first), more = std::move(more)](Run& run) {
    Value left = first(run);
    for (const auto& [sign, of] : more) {
      Value right = of(run);
      if (!compared(sign, left, right)) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  };
}

template <class Next>
Expression ExpressionParser::chain(std::initializer_list<const char*> signs, const Next& next) {
  Expression out = next();
  for (bool found = true; found;) {
    found = false;
    for (const char* sign : signs)
      if (take_sign(sign)) {
        out = [a = std::move(out), b = next(), sign = std::string(sign)](Run& run) {
          Value left = a(run);
          return calculated(sign, left, b(run));
        };
        found = true;
        break;
      }
  }
  return out;
}

Expression ExpressionParser::sum() {
  return chain({"+", "-"}, [this] { return joined(); });
}

Expression ExpressionParser::joined() {
  Expression out = product();
  while (take_sign("~"))
    out = [a = std::move(out), b = product()](Run& run) {
      std::string left = a(run).str();
      return Value(left + b(run).str());
    };
  return out;
}

Expression ExpressionParser::product() {
  return chain({"*", "//", "/", "%"}, [this] { return chain({"**"}, [this] { return unary(true); }); });
}

Expression ExpressionParser::unary(bool filters) {
  const Deeper deeper(*this);
  Expression out;
  if (take_sign("-"))
    out = [of = unary(false)](Run& run) { return calculated("-", std::int64_t{0}, of(run)); };
  else if (take_sign("+"))
    out = [of = unary(false)](Run& run) { return calculated("+", std::int64_t{0}, of(run)); };
  else
    out = behind(primary());
  return filters ? filtered(std::move(out)) : out;
}

Expression ExpressionParser::primary() {
  const Token& token = here();
  switch (token.kind) {
    case Kind::name:
      ++at_;
      for (const auto& [word, value] : {std::pair("true", Value(true)),
                                        {"True", Value(true)},
                                        {"false", Value(false)},
                                        {"False", Value(false)},
                                        {"none", Value(None{})},
                                        {"None", Value(None{})}})
        if (token.text == word) return constant(value);
      return [name = token.text](Run& run) {
        Value found = run.scope->get(name);
        return found.is_undefined() ? global(name) : found;
      };
    case Kind::string: {
      std::string text;
      while (here().kind == Kind::string) text += tokens_[at_++].text;
      return constant(std::move(text));
    }
    case Kind::integer:
      ++at_;
      if (token.text.size() > 18) wrong(cat("'", token.text, "' is beyond 64 bits"));
      return constant(static_cast<std::int64_t>(std::stoll(token.text)));
    case Kind::real:
      ++at_;
      return constant(std::stod(token.text));
    default:
      break;
  }
  if (take_sign("(")) return parenthesis();
  if (take_sign("[")) {
    std::vector<Expression> items;
    while (!take_sign("]")) {
      items.push_back(expression());
      if (!is_sign("]")) expect_sign(",");
    }
    return list_of(std::move(items), false);
  }
  if (take_sign("{")) return dictionary();
  wrong(cat("an expression is missing before ", shown()));
}

Expression ExpressionParser::parenthesis() {
  std::vector<Expression> items;
  bool tuple = is_sign(")");
  while (!take_sign(")")) {
    items.push_back(expression());
    if (is_sign(")")) continue;
    expect_sign(",");
    tuple = true;
  }
  return tuple ? list_of(std::move(items), true) : items[0];
}

Expression ExpressionParser::dictionary() {
  std::vector<std::pair<Expression, Expression>> items;
  while (!take_sign("}")) {
    Expression key = expression();
    expect_sign(":");
    items.emplace_back(std::move(key), expression());
    if (!is_sign("}")) expect_sign(",");
  }
  return [items = std::move(items)](Run& run) {
    Value out = Value::dict({});
    for (const auto& [key, item] : items) {
      Value own = key(run), value = item(run);
      Dict& all = out.mapping().items;
      const auto found =
          std::find_if(all.begin(), all.end(), [&](const auto& of) { return equal(of.first, own); });
      if (found != all.end())
        found->second = std::move(value);
      else
        all.emplace_back(std::move(own), std::move(value));
    }
    return out;
  };
}

CallSyntax ExpressionParser::call() {
  CallSyntax out;
  while (!take_sign(")")) {
    CallSyntax::One one;
    if (take_sign("*"))
      one.stars = 1;
    else if (take_sign("**"))
      one.stars = 2;
    else if (here().kind == Kind::name && ahead().kind == Kind::sign && ahead().text == "=")
      one.name = name(), ++at_;
    one.value = expression();
    out.all.push_back(std::move(one));
    if (!is_sign(")")) expect_sign(",");
  }
  return out;
}

Expression ExpressionParser::called(Expression of, std::string what) {
  return [of = std::move(of), arguments = call(), what = std::move(what)](Run& run) {
    const Value function = of(run);
    if (!function.is_function()) template_error(cat("'", what, "' is ", function.kind(), ", and is called"));
    Arguments given = arguments.evaluate(run);
    Value out = function.function()(given);
    if (out.is_dict() && out.mapping().is_namespace) run.namespaces.push_back(out);
    if (out.is_list()) run.steps += static_cast<std::int64_t>(out.sequence().items.size());
    if (++run.steps > most_steps) template_error("the template does not end");
    return out;
  };
}

Expression ExpressionParser::subscript(Expression of) {
  Expression parts[3];
  bool sliced = false;
  for (int i = 0; i < 3; ++i) {
    if (!is_sign(":") && !is_sign("]")) parts[i] = expression();
    if (!take_sign(":")) break;
    sliced = true;
  }
  expect_sign("]");
  if (!sliced) {
    if (!parts[0]) wrong("an index is missing");
    return [of = std::move(of), key = std::move(parts[0])](Run& run) {
      const Value value = of(run);
      return attribute(value, key(run));
    };
  }
  return [of = std::move(of), from = std::move(parts[0]), to = std::move(parts[1]),
          step = std::move(parts[2])](Run& run) {
    const auto place = [&run](const Expression& at) -> std::optional<std::int64_t> {
      if (!at) return {};
      const Value value = at(run);
      if (value.is_none()) return {};
      return value.integer();
    };
    const Value value = of(run);
    return slice(value, place(from), place(to), place(step));
  };
}

Expression ExpressionParser::behind(Expression out) {
  std::string what = at_ > 0 ? tokens_[at_ - 1].text : "";
  for (;;) {
    if (take_sign(".")) {
      what = here().text;
      if (here().kind == Kind::integer)
        out = [of = std::move(out), index = std::stoll(tokens_[at_++].text)](Run& run) {
          return attribute(of(run), static_cast<std::int64_t>(index));
        };
      else
        out = [of = std::move(out), name = name()](Run& run) {
          const Value value = of(run);
          // A method goes before an item of that name, as in Python.
          if (Value own = method(value, name); !own.is_undefined()) return own;
          return attribute(value, name);
        };
    } else if (take_sign("[")) {
      out = subscript(std::move(out));
    } else if (take_sign("(")) {
      out = called(std::move(out), what);
    } else {
      return out;
    }
  }
}

Expression ExpressionParser::filtered(Expression out) {
  for (;;) {
    if (take_sign("|")) {
      std::string which = name();
      CallSyntax arguments;
      if (take_sign("(")) arguments = call();
      out = [of = std::move(out), which = std::move(which), arguments = std::move(arguments)](Run& run) {
        const Value value = of(run);
        Arguments given = arguments.evaluate(run);
        Value made = filter(which, value, given);
        given.done(cat("the filter ", which));
        return made;
      };
    } else if (take_word("is")) {
      out = tested(std::move(out));
    } else if (take_sign("(")) {
      out = called(std::move(out), "what stands here");
    } else {
      return out;
    }
  }
}

Expression ExpressionParser::tested(Expression of) {
  const bool negated = take_word("not");
  std::string which = name();
  CallSyntax arguments;
  const auto begins_value = [&] {
    if (here().kind == Kind::name)
      return !is_word("else") && !is_word("or") && !is_word("and") && !is_word("if") && !is_word("is") &&
             !is_word("in") && !is_word("not");
    return here().kind == Kind::string || here().kind == Kind::integer || here().kind == Kind::real ||
           is_sign("[") || is_sign("{");
  };
  if (take_sign("("))
    arguments = call();
  else if (begins_value())
    arguments.all.push_back({"", behind(primary())});
  return [of = std::move(of), which = std::move(which), arguments = std::move(arguments), negated](Run& run) {
    const Value value = of(run);
    Arguments given = arguments.evaluate(run);
    const bool holds = test(which, value, given);
    given.done(cat("the test ", which));
    return Value(holds != negated);
  };
}

}  // namespace sherd::data::jinja
