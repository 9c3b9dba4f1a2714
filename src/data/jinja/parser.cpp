#include <algorithm>

#include "data/jinja/builtins.h"
#include "data/jinja/expression_parser.h"
#include "data/jinja/operations.h"
#include "data/jinja/template.h"

namespace sherd::data::jinja {
namespace {

/// Gives each name its item; with one, all of the value.
void unpack(Scope& scope, const std::vector<std::string>& names, const Value& value) {
  if (names.size() == 1) return scope.set(names[0], value);
  const List items = value.items();
  if (items.size() != names.size())
    template_error(cat(names.size(), " names are to be set from ", items.size(), " items"));
  for (std::size_t i = 0; i < names.size(); ++i) scope.set(names[i], items[i]);
}

class Parser : ExpressionParser {
 public:
  explicit Parser(std::string_view text) : ExpressionParser(text) {}

  Statement parse() {
    Statement body = statements({});
    if (here().kind != Kind::end) wrong("a block ends that none began");
    return body;
  }
  bool marks_answers() const { return marks_answers_; }

 private:
  /// Runs a statement, and adds its line to an error that has none.
  Statement at_line(int line, Statement statement) {
    return [line, statement = std::move(statement)](Run& run) {
      if (++run.steps > most_steps) template_error(cat("line ", line, ": the template does not end"));
      try {
        return statement(run);
      } catch (const Error& error) {
        if (std::string_view(error.what()).starts_with("line ")) throw;
        throw Error(error.kind(), cat("line ", line, ": ", error.what()));
      }
    };
  }
  bool at_block(const std::vector<std::string_view>& words) const {
    return here().kind == Kind::begin_block && ahead().kind == Kind::name &&
           std::find(words.begin(), words.end(), ahead().text) != words.end();
  }
  /// Up to a block that begins with one of these words.
  Statement statements(const std::vector<std::string_view>& until) {
    const Deeper deeper(*this);
    std::vector<Statement> all;
    while (here().kind != Kind::end && !at_block(until)) {
      const int line = here().line;
      if (here().kind == Kind::text) {
        all.push_back([text = here().text](Run& run) { return run.out += text, Flow::next; });
        ++at_;
      } else if (here().kind == Kind::begin_print) {
        ++at_;
        Expression value = tuple_or_one();
        expect(Kind::end_print);
        all.push_back(at_line(line, [value = std::move(value)](Run& run) {
          run.out += value(run).str();
          if (run.out.size() > most_text) template_error("more than 256 MiB are written");
          return Flow::next;
        }));
      } else {
        expect(Kind::begin_block);
        if (here().kind == Kind::name && here().text.starts_with("end") && until.empty())
          wrong(cat("'", here().text, "' ends a block that none began"));
        all.push_back(at_line(line, block()));
      }
    }
    return [all = std::move(all)](Run& run) {
      for (const Statement& one : all)
        if (const Flow flow = one(run); flow != Flow::next) return flow;
      return Flow::next;
    };
  }
  /// The body of a block up to its end, or to one of these words, which it leaves.
  Statement body(std::string_view end, std::vector<std::string_view> others = {}) {
    expect(Kind::end_block);
    const int line = here().line;
    others.push_back(end);
    Statement out = statements(others);
    if (here().kind == Kind::end)
      throw Error(ErrorKind::data, cat("line ", line, ": the block that begins here has no '", end, "'"));
    ++at_;
    return out;
  }
  void end(std::string_view word) {
    expect_word(word);
    if (here().kind == Kind::name) ++at_;  // the name of a macro or block, which may stand there again
    expect(Kind::end_block);
  }
  Expression tuple_or_one() {
    std::vector<Expression> items{expression()};
    bool tuple = false;
    while (take_sign(",")) {
      tuple = true;
      if (here().kind == Kind::end_block || here().kind == Kind::end_print) break;
      items.push_back(expression());
    }
    return tuple ? list_of(std::move(items), true) : items[0];
  }

  Statement block() {
    const std::string word = name();
    if (word == "if") return conditional();
    if (word == "for") return loop();
    if (word == "set") return assignment();
    if (word == "macro") return macro();
    if (word == "call") return call_block();
    if (word == "filter") return filter_block();
    if (word == "with") return with_block();
    if (word == "generation") return generation();
    if (word == "break" || word == "continue") {
      if (loops_ == 0) wrong(cat("'", word, "' stands in no loop"));
      expect(Kind::end_block);
      return [flow = word == "break" ? Flow::end_of_loop : Flow::end_of_turn](Run&) { return flow; };
    }
    wrong(cat("Sherd does not know the statement '", excerpt(word, 40), "' of Jinja"));
  }

  Statement conditional() {
    struct Branch {
      Expression condition;  ///< null: else
      Statement body;
    };
    std::vector<Branch> branches;
    Expression condition = expression();
    for (;;) {
      Statement then = body("endif", {"elif", "else"});
      branches.push_back({std::move(condition), std::move(then)});
      if (take_word("elif")) {
        condition = expression();
        continue;
      }
      if (take_word("else")) {
        branches.push_back({nullptr, body("endif")});
      }
      end("endif");
      break;
    }
    return [branches = std::move(branches)](Run& run) {
      for (const Branch& branch : branches)
        if (!branch.condition || branch.condition(run).is_true()) return branch.body(run);
      return Flow::next;
    };
  }

  std::vector<std::string> names() {
    const bool closed = take_sign("(");
    std::vector<std::string> out{name()};
    while (take_sign(",")) out.push_back(name());
    if (closed) expect_sign(")");
    return out;
  }

  Statement loop() {
    std::vector<std::string> targets = names();
    expect_word("in");
    Expression items = either();  // as Jinja: no `if … else`, whose `if` is the loop's
    if (is_sign(",")) wrong("a loop goes over one value");
    Expression condition;
    if (take_word("if")) condition = expression();
    if (is_word("recursive")) wrong("Sherd does not know recursive loops of Jinja");
    ++loops_;
    const std::size_t begin = at_;
    Statement turn = body("endfor", {"else"});
    // Most need no `loop`, which takes longer to make than they take.
    const bool asks = std::any_of(tokens_.begin() + static_cast<std::ptrdiff_t>(begin),
                                  tokens_.begin() + static_cast<std::ptrdiff_t>(at_), [](const Token& token) {
                                    return token.kind == Kind::name && token.text == "loop";
                                  });
    --loops_;
    Statement none;
    if (take_word("else")) none = body("endfor");
    end("endfor");
    return [targets = std::move(targets), items = std::move(items), condition = std::move(condition),
            turn = std::move(turn), none = std::move(none), asks](Run& run) {
      List all = items(run).items();
      if (condition) {
        List kept;
        for (const Value& item : all) {
          InnerScope inner(run);
          unpack(inner.scope(), targets, item);
          if (condition(run).is_true()) kept.push_back(item);
        }
        all = std::move(kept);
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (++run.steps > most_steps) template_error("the loop does not end");
        InnerScope inner(run);
        if (asks) inner.scope().set("loop", loop_of(all, i));
        unpack(inner.scope(), targets, all[i]);
        if (turn(run) == Flow::end_of_loop) break;
      }
      if (all.empty() && none) none(run);
      return Flow::next;
    };
  }

  Statement assignment() {
    std::string first = name();
    if (take_sign(".")) {
      std::string key = name();
      expect_sign("=");
      Expression value = tuple_or_one();
      expect(Kind::end_block);
      return [first = std::move(first), key = std::move(key), value = std::move(value)](Run& run) {
        const Value of = run.scope->get(first);
        if (!of.is_dict() || !of.mapping().is_namespace)
          template_error(cat("'", first, "' is no namespace whose attributes can be set"));
        Value made = value(run);
        for (auto& [own, item] : of.mapping().items)
          if (equal(own, key)) return item = std::move(made), Flow::next;
        of.mapping().items.emplace_back(key, std::move(made));
        return Flow::next;
      };
    }
    std::vector<std::string> targets{std::move(first)};
    while (take_sign(",")) targets.push_back(name());
    if (take_sign("=")) {
      Expression value = tuple_or_one();
      expect(Kind::end_block);
      return [targets = std::move(targets), value = std::move(value)](Run& run) {
        const Value made = value(run);
        return unpack(*run.scope, targets, made), Flow::next;
      };
    }
    // A block, whose text becomes the value.
    Expression text;
    Statement inner;
    if (is_sign("|")) {
      Expression start = [](Run& run) { return run.scope->get(" text of a block"); };
      text = filtered(std::move(start));
    }
    inner = body("endset");
    end("endset");
    return [targets = std::move(targets), inner = std::move(inner), text = std::move(text)](Run& run) {
      Value made;
      {
        InnerScope own(run);
        made = written(run, inner);
        own.scope().set(" text of a block", made);
        if (text) made = text(run);
      }
      return run.scope->set(targets[0], made), Flow::next;
    };
  }

  struct Parameter {
    std::string name;
    Expression otherwise;  ///< null: none
  };
  std::vector<Parameter> parameters() {
    std::vector<Parameter> out;
    while (!take_sign(")")) {
      Parameter one{name(), nullptr};
      if (take_sign("=")) one.otherwise = expression();
      out.push_back(std::move(one));
      if (!is_sign(")")) expect_sign(",");
    }
    return out;
  }
  /// A function that writes `body` into a text. It sees the names around the place where it was made, which
  /// live as long as the run.
  static Value writer(const std::string& what, const std::vector<Parameter>& parameters,
                      const Statement& body, Run& run) {
    run.scope->keep();
    return Value::function([what, parameters, body, &run, around = run.scope](Arguments& arguments) {
      if (++run.depth > most_calls) template_error("more than 200 calls lie within each other");
      Scope* const outer = std::exchange(run.scope, around);
      std::string out;
      {
        InnerScope inner(run);
        Scope& own = inner.scope();
        for (const Parameter& parameter : parameters) {
          const Value* given = arguments.take(parameter.name);
          own.set(parameter.name, given                 ? *given
                                  : parameter.otherwise ? parameter.otherwise(run)
                                                        : Value(Undefined{parameter.name}));
        }
        if (const Value* given = arguments.take("caller")) own.set("caller", *given);
        arguments.done(what);
        out = written(run, body);
      }
      run.scope = outer;
      --run.depth;
      return Value(std::move(out));
    });
  }
  Statement macro() {
    std::string called = name();
    expect_sign("(");
    std::vector<Parameter> all = parameters();
    const int loops = std::exchange(loops_, 0);
    Statement inner = body("endmacro");
    loops_ = loops;
    end("endmacro");
    return [called = std::move(called), all = std::move(all), inner = std::move(inner)](Run& run) {
      run.scope->set(called, writer(called, all, inner, run));
      return Flow::next;
    };
  }
  Statement call_block() {
    std::vector<Parameter> all;
    if (take_sign("(")) all = parameters();
    std::string what = here().text;
    Expression of = primary();
    while (take_sign("."))
      of = [of = std::move(of), key = name()](Run& run) { return attribute(of(run), key); };
    expect_sign("(");
    CallSyntax arguments = call();
    Statement inner = body("endcall");
    end("endcall");
    return [all = std::move(all), of = std::move(of), what = std::move(what),
            arguments = std::move(arguments), inner = std::move(inner)](Run& run) {
      const Value function = of(run);
      if (!function.is_function())
        template_error(cat("'", what, "' is ", function.kind(), ", and is called"));
      Arguments given = arguments.evaluate(run);
      List positional = given.rest();
      auto named = given.rest_by_name();
      named.emplace_back("caller", writer("caller", all, inner, run));
      Arguments whole(std::move(positional), std::move(named));
      run.out += function.function()(whole).str();
      return Flow::next;
    };
  }
  Statement filter_block() {
    --at_;  // its word, in whose place the text stands
    tokens_[at_].text = " text of a block";
    Token bar{Kind::sign, "|", here().line};
    tokens_.insert(tokens_.begin() + static_cast<std::ptrdiff_t>(at_) + 1, bar);
    Expression text = filtered(primary());
    Statement inner = body("endfilter");
    end("endfilter");
    return [text = std::move(text), inner = std::move(inner)](Run& run) {
      InnerScope own(run);
      own.scope().set(" text of a block", written(run, inner));
      run.out += text(run).str();
      return Flow::next;
    };
  }
  Statement with_block() {
    std::vector<std::pair<std::string, Expression>> values;
    while (here().kind == Kind::name) {
      std::string target = name();
      expect_sign("=");
      values.emplace_back(std::move(target), expression());
      if (!take_sign(",")) break;
    }
    Statement inner = body("endwith");
    end("endwith");
    return [values = std::move(values), inner = std::move(inner)](Run& run) {
      List made;
      for (const auto& [target, value] : values) made.push_back(value(run));
      InnerScope own(run);
      for (std::size_t i = 0; i < values.size(); ++i) own.scope().set(values[i].first, made[i]);
      return inner(run);
    };
  }
  Statement generation() {
    marks_answers_ = true;
    Statement inner = body("endgeneration");
    end("endgeneration");
    return [inner = std::move(inner)](Run& run) {
      InnerScope own(run);
      const std::size_t begin = run.out.size();
      const Flow flow = inner(run);
      run.generated.push_back({begin, run.out.size()});
      return flow;
    };
  }

  int loops_ = 0;
  bool marks_answers_ = false;
};

}  // namespace

Template::Template(std::string_view text) {
  Parser parser(text);
  body_ = std::make_shared<const Statement>(parser.parse());
  marks_answers_ = parser.marks_answers();
}

std::string Template::render(const Dict& names, std::vector<Generated>* generated) const {
  Scope scope;
  for (const auto& [name, value] : names) scope.set(name.str(), value);
  Run run{{}, &scope};
  (*body_)(run);
  if (run.lost_marks) run.generated.clear();
  if (generated) *generated = std::move(run.generated);
  return std::move(run.out);
}

}  // namespace sherd::data::jinja
