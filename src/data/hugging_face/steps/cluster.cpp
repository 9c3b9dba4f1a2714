#include "data/hugging_face/steps/cluster.h"

#include <unicode/uchar.h>
#include <unicode/uscript.h>

#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

// PCRE2's \X (10.42) joins any two pictographs, and knows no conjuncts; ICU's iterators (72) neither know
// them.

namespace sherd::data {
namespace {

/// The properties of a character that the rules ask for: Grapheme_Cluster_Break, Extended_Pictographic, and
/// Indic_Conjunct_Break, which ICU 72 does not have but derives from what it has.
struct ClusterClass {
  int break_class = U_GCB_OTHER;
  bool pictograph = false, consonant = false, linker = false, non_joiner = false;
};

bool has_conjuncts(UChar32 c) {
  UErrorCode status = U_ZERO_ERROR;
  switch (uscript_getScript(c, &status)) {
    case USCRIPT_BENGALI:
    case USCRIPT_DEVANAGARI:
    case USCRIPT_GUJARATI:
    case USCRIPT_MALAYALAM:
    case USCRIPT_ORIYA:
    case USCRIPT_TELUGU:
      return true;
    default:
      return false;
  }
}

ClusterClass class_of(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  ClusterClass out;
  out.break_class = u_getIntPropertyValue(c, UCHAR_GRAPHEME_CLUSTER_BREAK);
  out.pictograph = out.break_class == U_GCB_OTHER && u_hasBinaryProperty(c, UCHAR_EXTENDED_PICTOGRAPHIC);
  const int syllabic = u_getIntPropertyValue(c, UCHAR_INDIC_SYLLABIC_CATEGORY);
  out.consonant = syllabic == U_INSC_CONSONANT && has_conjuncts(c);
  out.non_joiner = c == 0x200C;  // it extends clusters, not conjuncts
  out.linker = syllabic == U_INSC_VIRAMA && has_conjuncts(c);
  return out;
}

bool is_control_break(int break_class) {
  return break_class == U_GCB_CONTROL || break_class == U_GCB_CR || break_class == U_GCB_LF;
}

/// The rules that look at two classes alone.
bool joins(int before, int behind) {
  if (before == U_GCB_CR && behind == U_GCB_LF) return true;
  if (is_control_break(before) || is_control_break(behind)) return false;
  if (behind == U_GCB_EXTEND || behind == U_GCB_ZWJ || behind == U_GCB_SPACING_MARK) return true;
  const bool vowel = behind == U_GCB_V, trailing = behind == U_GCB_T;
  switch (before) {
    case U_GCB_PREPEND:
      return true;
    case U_GCB_L:
      return behind == U_GCB_L || vowel || behind == U_GCB_LV || behind == U_GCB_LVT;
    case U_GCB_LV:
    case U_GCB_V:
      return vowel || trailing;
    case U_GCB_LVT:
    case U_GCB_T:
      return trailing;
    default:
      return false;
  }
}

/// The state that the rules need of the characters before.
class ClusterState {
 public:
  /// Whether the next character goes on with the cluster; the first one does.
  bool takes(const ClusterClass& next) {
    const bool flags = before_ == U_GCB_REGIONAL_INDICATOR && next.break_class == U_GCB_REGIONAL_INDICATOR;
    const bool taken = !begun_ || joins(before_, next.break_class) || (flags && regions_ % 2 == 1) ||
                       (next.pictograph && pictograph_ && before_ == U_GCB_ZWJ) ||
                       (next.consonant && linked_);
    begin_or_go_on(next);
    return taken;
  }

 private:
  void begin_or_go_on(const ClusterClass& next) {
    const bool extends = next.break_class == U_GCB_EXTEND || next.break_class == U_GCB_ZWJ;
    pictograph_ = next.pictograph || (pictograph_ && extends && before_ != U_GCB_ZWJ);
    const bool within = next.linker || (extends && !next.non_joiner);
    linked_ = consonant_ && within && (next.linker || linked_);
    consonant_ = next.consonant || (consonant_ && within);
    regions_ = next.break_class == U_GCB_REGIONAL_INDICATOR ? regions_ + 1 : 0;
    before_ = next.break_class;
    begun_ = true;
  }

  bool begun_ = false, pictograph_ = false, consonant_ = false, linked_ = false;
  int before_ = U_GCB_OTHER, regions_ = 0;
};

}  // namespace

std::size_t cluster_length(std::string_view text) {
  ClusterState state;
  std::size_t length = 0;
  while (length < text.size() && state.takes(class_of(first_character(text.substr(length)))))
    length += utf8_length(text.substr(length));
  return length;
}

}  // namespace sherd::data
