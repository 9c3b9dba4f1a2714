#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/template.h"
#include "data/jinja/value.h"

namespace sherd::data::jinja {

/// Names that are known at a place, and those around it. Loops, macros and blocks have one of their own.
class Scope {
 public:
  explicit Scope(Scope* outer = nullptr) : outer_(outer) {}
  /// A macro sees it, and lives as long as the run.
  void keep() {
    for (Scope* at = this; at; at = at->outer_) at->kept_ = true;
  }
  bool kept() const { return kept_; }
  void set(const std::string& name, Value value) { names_[name] = std::move(value); }
  Value get(const std::string& name) const {
    for (const Scope* at = this; at; at = at->outer_)
      if (const auto found = at->names_.find(name); found != at->names_.end()) return found->second;
    return Undefined{name};
  }

 private:
  Scope* outer_;
  bool kept_ = false;
  std::map<std::string, Value> names_;
};

/// A template that is being run.
struct Run {
  std::string out;
  Scope* scope;
  std::vector<Generated> generated = {};
  bool lost_marks = false;  ///< some stood in a text that was put elsewhere
  std::int64_t steps = 0;
  int depth = 0;  ///< of calls within each other
  std::vector<std::unique_ptr<Scope>> kept = {};
  List namespaces = {};  ///< that were made; a template may put one into itself

  ~Run() {
    for (const Value& each : namespaces) each.mapping().items.clear();
  }
};

using Expression = std::function<Value(Run&)>;

inline constexpr std::int64_t most_steps = 5'000'000;             ///< statements that are run
inline constexpr std::size_t most_text = std::size_t{256} << 20;  ///< bytes that are written
inline constexpr int most_calls = 200;                            ///< within each other

/// For as long as it lives, names are set in a scope within the one before.
class InnerScope {
 public:
  explicit InnerScope(Run& run)
      : run_(run), own_(std::make_unique<Scope>(run.scope)), outer_(std::exchange(run.scope, own_.get())) {}
  ~InnerScope() {
    run_.scope = outer_;
    if (own_->kept()) run_.kept.push_back(std::move(own_));
  }
  InnerScope(const InnerScope&) = delete;
  InnerScope& operator=(const InnerScope&) = delete;
  Scope& scope() { return *own_; }

 private:
  Run& run_;
  std::unique_ptr<Scope> own_;
  Scope* outer_;
};

/// The text that a body writes, apart from what was written before.
inline std::string written(Run& run, const Statement& body) {
  const std::size_t before = run.out.size(), marks = run.generated.size();
  body(run);
  std::string out = run.out.substr(before);
  run.out.resize(before);
  run.lost_marks = run.lost_marks || run.generated.size() > marks;
  return out;
}

}  // namespace sherd::data::jinja
