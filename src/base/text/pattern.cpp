#include "base/text/pattern.h"

#include <regex>

#include "base/error.h"

namespace sherd {

struct CaselessPattern::Compiled {
  std::regex regex;
};

CaselessPattern::CaselessPattern(const std::string& text) try {
  if (text.empty()) throw std::regex_error(std::regex_constants::error_brack);
  compiled_ = std::make_shared<const Compiled>(
      Compiled{std::regex(text, std::regex::ECMAScript | std::regex::icase)});
} catch (const std::regex_error&) {
  fail(ErrorKind::config, "\"", text, "\" is no regular expression");
}

bool CaselessPattern::is_in(const std::string& text) const {
  return std::regex_search(text, compiled_->regex);
}

}  // namespace sherd
