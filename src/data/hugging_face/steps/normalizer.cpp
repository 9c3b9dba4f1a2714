#include "data/hugging_face/steps/steps.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uniset.h>

#include <algorithm>

#include "base/error.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

/// A normal form of the characters of Unicode 11 alone: the package's tables have no later ones, which stay
/// as they are and part what is before and behind them.
std::unique_ptr<const icu::Normalizer2> of_unicode_11(const icu::Normalizer2* (*form)(UErrorCode&)) {
  UErrorCode status = U_ZERO_ERROR;
  static const icu::UnicodeSet* known = [&] {
    auto* set = new icu::UnicodeSet("[:age=11.0:]", status);
    return set->freeze(), set;
  }();
  const icu::Normalizer2* whole = form(status);
  if (U_FAILURE(status)) fail(ErrorKind::data, "ICU has no normal forms: ", u_errorName(status));
  return std::make_unique<icu::FilteredNormalizer2>(*whole, *known);
}

const icu::Normalizer2& form_of(NormalizerKind kind) {
  static const auto nfc = of_unicode_11(icu::Normalizer2::getNFCInstance);
  static const auto nfd = of_unicode_11(icu::Normalizer2::getNFDInstance);
  static const auto nfkc = of_unicode_11(icu::Normalizer2::getNFKCInstance);
  static const auto nfkd = of_unicode_11(icu::Normalizer2::getNFKDInstance);
  return kind == NormalizerKind::nfc    ? *nfc
         : kind == NormalizerKind::nfd  ? *nfd
         : kind == NormalizerKind::nfkc ? *nfkc
                                        : *nfkd;
}

/// False where `text` is in that form.
bool to_form(NormalizerKind kind, std::string_view text, std::string& out) {
  if (is_ascii(text)) return false;
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2& form = form_of(kind);
  const icu::StringPiece piece(text.data(), static_cast<std::int32_t>(text.size()));
  bool done = U_SUCCESS(status) && form.isNormalizedUTF8(piece, status);
  if (!done && U_SUCCESS(status)) {
    icu::StringByteSink<std::string> sink(&out, static_cast<std::int32_t>(text.size()));
    form.normalizeUTF8(0, piece, sink, nullptr, status);
  }
  if (U_FAILURE(status)) fail(ErrorKind::data, "ICU cannot normalise a text: ", u_errorName(status));
  return !done;
}

bool replace(const NormalizerStep& step, std::string_view text, bool goes_on, std::string& out,
             MatchSpace& space, std::size_t& of_first) {
  // A text that goes on has something in front, so that \A is not there.
  const std::string longer = goes_on ? cat('x', text) : std::string();
  if (goes_on) text = longer;
  std::size_t done = goes_on ? 1 : 0, first = of_first;
  bool changed = false;
  const auto on_match = [&](std::size_t begin, std::size_t end) {
    out.append(text.substr(done, begin - done));
    // The text that comes is counted to the last character of the one that went.
    if (begin < of_first)
      first = end <= of_first ? out.size() + step.content.size() + (of_first - end) : out.size();
    out += step.content;
    done = end, changed = true;
  };
  step.pattern->for_each(text, space, on_match, done);
  of_first = first;
  if (changed) out.append(text.substr(done));
  return changed;
}

/// BERT's ideographs, which are not all that Unicode has.
bool is_bert_cjk(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0x20000 && c <= 0x2A6DF) ||
         (c >= 0x2A700 && c <= 0x2B73F) || (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

/// As SentencePiece's rules for translation have it, which the package repeats.
bool is_dropped_by_nmt(char32_t c) {
  return (c >= 0x1 && c <= 0x8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F;
}
bool is_space_to_nmt(char32_t c) {
  return c == 0x9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 || (c >= 0x200B && c <= 0x200F) ||
         c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
}

/// One character by one of the steps that look at nothing else.
void append_changed(NormalizerKind kind, std::string_view character, std::string& out) {
  const char32_t c = first_character(character);
  if (kind == NormalizerKind::lowercase) return append_lower(c, out);
  if (kind == NormalizerKind::strip_nonspacing && is_nonspacing_mark(c)) return;
  if (kind == NormalizerKind::strip_accents && is_mark(c)) return;
  if (kind == NormalizerKind::nmt) {
    if (is_dropped_by_nmt(c)) return;
    if (is_space_to_nmt(c)) return out.push_back(' ');
  }
  if (kind == NormalizerKind::clean) {
    const bool kept = c == '\t' || c == '\n' || c == '\r';
    if (c == 0xFFFD || (!kept && is_control(c))) return;
    if (kept || is_space(c)) return out.push_back(' ');
  }
  const bool apart = kind == NormalizerKind::space_cjk && is_bert_cjk(c);
  if (apart) out.push_back(' ');
  out.append(character);
  if (apart) out.push_back(' ');
}

bool by_characters(NormalizerKind kind, std::string_view text, std::string& out) {
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view character = rest.substr(0, utf8_length(rest));
    append_changed(kind, character, out);
    rest.remove_prefix(character.size());
  }
  return true;
}

/// The part of `text` that stays.
std::string_view stripped(const NormalizerStep& step, std::string_view text, bool goes_on) {
  while (step.left && !goes_on && !text.empty() && is_space(first_character(text)))
    text.remove_prefix(utf8_length(text));
  while (step.right && !text.empty() && is_space(last_character(text))) text.remove_suffix(last_length(text));
  return text;
}

/// The bytes at the front of `out`, a form of `text`, that are that of the first bytes of `text`.
std::size_t form_of_first(NormalizerKind kind, std::string_view text, std::size_t of_first,
                          const std::string& out) {
  if (of_first == 0) return 0;
  std::string alone;
  if (!to_form(kind, text.substr(0, of_first), alone)) alone = text.substr(0, of_first);
  return out.starts_with(alone) ? alone.size() : utf8_length(out);  // composed with what follows
}

/// False where the step leaves `text` as it is; else the result is in `out`, which was empty.
bool run(const NormalizerStep& step, std::string_view text, bool goes_on, std::string& out, MatchSpace& space,
         std::size_t& of_first) {
  if (text.empty()) return false;
  switch (step.kind) {
    case NormalizerKind::replace:
      return replace(step, text, goes_on, out, space, of_first);
    case NormalizerKind::prepend:
      if (goes_on) return false;
      out = step.content;
      out.append(text);
      if (of_first > 0) of_first += step.content.size();
      return true;
    case NormalizerKind::lowercase:
    case NormalizerKind::nmt:
    case NormalizerKind::strip_accents:
    case NormalizerKind::strip_nonspacing:
    case NormalizerKind::clean:
    case NormalizerKind::space_cjk:
      by_characters(step.kind, text.substr(0, of_first), out);
      of_first = out.size();
      return out.clear(), by_characters(step.kind, text, out);
    case NormalizerKind::precompiled:
      return step.charsmap->apply(text, out, of_first);
    case NormalizerKind::strip:
      out = stripped(step, text, goes_on);
      if (step.left && !goes_on) {
        const auto gone = static_cast<std::size_t>(
            stripped({NormalizerKind::strip, nullptr, "", true, false}, text, false).data() - text.data());
        of_first = of_first > gone ? of_first - gone : 0;
      }
      of_first = std::min(of_first, out.size());
      return out.size() != text.size();
    default:
      if (!to_form(step.kind, text, out)) return false;
      of_first = form_of_first(step.kind, text, of_first, out);
      return true;
  }
}

}  // namespace

std::string_view Normalizer::apply(std::string_view text, std::string& storage, MatchSpace& space,
                                   bool goes_on, std::size_t* of_first) const {
  constexpr std::size_t longest = std::size_t{1} << 30;  // ICU counts in 32 bits
  require(text.size() < longest, "a text of ", text.size(), " bytes is too long to normalise; cut it");
  std::string next;
  std::size_t first = of_first != nullptr ? *of_first : 0;
  for (const NormalizerStep& step : steps_) {
    next.clear();
    if (!run(step, text, goes_on, next, space, first)) continue;
    storage.swap(next);
    text = storage;
  }
  if (of_first != nullptr) *of_first = first;
  return text;
}

}  // namespace sherd::data
