#pragma once

#include <memory>
#include <string>

namespace sherd {

/// A regular expression (ECMAScript's grammar), case ignored, as DeepSpeed's partition_method "type:REGEX"
/// has one.
class CaselessPattern {
 public:
  /// Throws Error{config} where `text` is none, or empty.
  explicit CaselessPattern(const std::string& text);
  /// Whether it matches a part of `text`.
  bool is_in(const std::string& text) const;

 private:
  struct Compiled;  // <regex> takes seconds to compile, and is for one source alone
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace sherd
