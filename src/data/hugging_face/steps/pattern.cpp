#include "data/hugging_face/steps/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

constexpr std::size_t first_stack = std::size_t{32} << 10, largest_stack = std::size_t{8} << 20;
constexpr std::uint32_t most_steps = 100'000'000;  // the interpreter's, where there is no compiler

const unsigned char* code_units(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string message_of(int code) {
  unsigned char text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct MatchSpace::Impl {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(first_stack, largest_stack, nullptr);
};

MatchSpace::MatchSpace() : impl_(std::make_unique<Impl>()) {
  require(impl_->data && impl_->context, "no memory to search a text with");
  if (impl_->stack) pcre2_jit_stack_assign(impl_->context, nullptr, impl_->stack);
  pcre2_set_match_limit(impl_->context, most_steps);
}

MatchSpace::~MatchSpace() {
  if (impl_->stack) pcre2_jit_stack_free(impl_->stack);
  pcre2_match_context_free(impl_->context);
  pcre2_match_data_free(impl_->data);
}

struct Pattern::Code {
  pcre2_code* code = nullptr;
  bool compiled = false;  // to machine code
  ~Code() { pcre2_code_free(code); }
};

Pattern::Pattern() = default;
Pattern::~Pattern() = default;

std::shared_ptr<const Pattern> Pattern::expression(const std::string& text) {
  const std::string translated = to_pcre(text);
  std::shared_ptr<Pattern> out(new Pattern);
  out->text_ = text;
  out->code_ = std::make_unique<Code>();
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  std::size_t at = 0;
  out->code_->code =
      pcre2_compile(code_units(translated), translated.size(),
                    PCRE2_UTF | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, context.get());
  if (!out->code_->code)
    fail(ErrorKind::data, "the expression '", excerpt(text, 300),
         "' is none that PCRE2 compiles: ", message_of(error), ", at '",
         excerpt(translated.substr(std::min(at, translated.size())), 40), "'");
  out->code_->compiled = pcre2_jit_compile(out->code_->code, PCRE2_JIT_COMPLETE) == 0;
  return out;
}

std::shared_ptr<const Pattern> Pattern::literal(const std::string& text) {
  std::shared_ptr<Pattern> out(new Pattern);
  out->text_ = text;
  return out;
}

bool Pattern::find(std::string_view text, std::size_t from, MatchSpace& space, std::size_t& begin,
                   std::size_t& end) const {
  if (!code_) {
    begin = text.find(text_, from);
    end = begin + text_.size();
    return begin != std::string_view::npos;
  }
  MatchSpace::Impl& with = *space.impl_;
  const auto match = code_->compiled ? pcre2_jit_match : pcre2_match;
  const int found = match(code_->code, code_units(text), text.size(), from,
                          code_->compiled ? 0 : PCRE2_NO_UTF_CHECK, with.data, with.context);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0)
    fail(ErrorKind::data, "searching a text of ", text.size(), " bytes for '", excerpt(text_, 300),
         "' fails: ", message_of(found), "; cut the text into shorter documents");
  const std::size_t* place = pcre2_get_ovector_pointer(with.data);
  begin = place[0], end = place[1];
  return true;
}

}  // namespace sherd::data
