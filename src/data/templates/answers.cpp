#include "data/templates/answers.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

bool begins_character(std::string_view text, std::size_t at) {
  return at >= text.size() || (static_cast<unsigned char>(text[at]) & 0xc0u) != 0x80u;
}

/// Where two texts differ, in the first one, whole characters.
jinja::Generated difference(std::string_view text, std::string_view other) {
  std::size_t begin = static_cast<std::size_t>(
      std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
  while (!begins_character(text, begin)) --begin;
  const std::size_t most = std::min(text.size(), other.size()) - begin;
  std::size_t same = 0;
  while (same < most && text[text.size() - 1 - same] == other[other.size() - 1 - same]) ++same;
  while (!begins_character(text, text.size() - same)) --same;
  return {begin, text.size() - same};
}

/// To where a text is another one, from `from` on, whole tokens.
std::size_t common_front(std::string_view text, std::size_t from, std::string_view other,
                         const std::vector<Control>& controls) {
  const std::string_view part = text.substr(from);
  std::size_t same =
      from + static_cast<std::size_t>(
                 std::mismatch(part.begin(), part.end(), other.begin(), other.end()).first - part.begin());
  while (!begins_character(text, same)) --same;
  for (const Control& control : controls)
    if (control.begin < same && same < control.end) same = control.begin;
  return same;
}

/// The texts of messages in what a template writes, found by one more rendering, where between each two of
/// them it writes a token of its own: by message.
std::map<std::size_t, jinja::Generated> align(const WrittenConversation& written, const TemplateRun& by,
                                              std::string_view text) {
  std::string other;
  std::vector<std::size_t> marked;
  try {
    other = written.numbered(marked);
  } catch (const Error&) {  // of a text that it takes apart
    return {};
  }
  const std::string_view all = other;
  const std::vector<Control> controls = controls_in(by, other);
  std::vector<std::pair<std::size_t, std::size_t>> places;  // of marks, and of which messages
  for (const std::size_t which : marked) {
    const std::string mark = WrittenConversation::numbered_mark(which);
    const std::size_t begin = other.find(mark);
    if (begin == std::string::npos || other.find(mark, begin + mark.size()) != std::string::npos) return {};
    places.emplace_back(begin, which);
  }
  std::sort(places.begin(), places.end());
  std::map<std::size_t, jinja::Generated> out;
  std::size_t literal = 0,
              at = 0;  // where what stands in front of a mark begins; how much of `text` is known
  jinja::Generated* before = nullptr;
  for (const auto& [begin, which] : places) {
    const std::string_view between = all.substr(literal, begin - literal);
    const bool tells = std::any_of(
        controls.begin(), controls.end(),
        [&, from = literal, to = begin](const Control& c) { return from <= c.begin && c.end <= to; });
    const std::size_t found = before ? text.find(between, at) : 0;
    if (before ? found == std::string_view::npos || !tells : !text.starts_with(between)) return {};
    if (before) before->end = found;
    at = found + between.size();
    before = &(out[which] = {at, at});
    literal = begin + WrittenConversation::numbered_mark(which).size();
  }
  const std::string_view behind = all.substr(literal);
  if (!before || text.size() < at + behind.size() || !text.ends_with(behind)) return {};
  before->end = text.size() - behind.size();
  return out;
}

/// Finds answers, one after the other.
class AnswerFinder {
 public:
  AnswerFinder(WrittenConversation& written, const TemplateRun& by, std::string_view text,
               const std::vector<Control>& controls, const AnswerEnd& end)
      : written_(written),
        by_(by),
        text_(text),
        controls_(controls),
        end_(end),
        aligned_(align(written, by, text)) {}

  /// One part; of an answer that calls a tool perhaps a second one, what it says behind the result.
  void find(std::size_t which, std::vector<jinja::Generated>& out) {
    if (!out.empty()) before_ = out.back().end;
    if (!written_.calls(which)) {
      jinja::Generated part = own_text(which);
      part.begin = begin_of(which, part.begin);
      part.end = end_of(part.end);
      return out.push_back(part);
    }
    jinja::Generated call = other_than(which, written_.with_other_calls(which));
    if (!written_.says(which)) return out.push_back(whole_call(which, call));
    const jinja::Generated said = other_than(which, written_.with_other_content(which));
    if (said.begin <= call.begin) return out.push_back(whole_call(which, {said.begin, call.end}));
    out.push_back(whole_call(which, call));
    out.push_back({said.begin, end_of(said.end)});
  }

 private:
  jinja::Generated own_text(std::size_t which) {
    const auto known = aligned_.find(which);
    return known != aligned_.end() ? known->second : other_than(which, written_.with_another(which));
  }

  jinja::Generated other_than(std::size_t which, const std::string& other) const {
    const std::size_t mark = other.find(mark_answer);
    const bool several = mark != std::string::npos && !written_.calls(which) &&
                         other.find(mark_answer, mark + 1) != std::string::npos;
    if (other == text_ || mark == std::string::npos || several)
      fail(
          ErrorKind::data, "which part of what the template writes is message ", which + 1,
          ", an answer, cannot be told, as it is written ",
          several ? "more than once" : "in part or not at all",
          ": mark it by {% generation %} in the template, or say in the message that it is not to be learned "
          "(\"train\": false)");
    return difference(text_, other);
  }

  std::size_t end_of(std::size_t at) const {
    const auto ends = [at](const Control& control) { return control.end == at; };
    return std::any_of(controls_.begin(), controls_.end(), ends) ? at
                                                                 : behind_end(text_, at, controls_, end_);
  }

  /// A call with what stands around its arguments.
  jinja::Generated whole_call(std::size_t which, jinja::Generated part) {
    part.begin = begin_of(which, part.begin);
    // As far as it is written where nothing follows.
    const std::size_t alone =
        without_python_space_behind(
            text_.substr(0, common_front(text_, 0, render(which + 1, false), controls_)))
            .size();
    if (alone >= part.end) return {part.begin, end_of(alone)};
    // Else to the token that ends answers, if that comes before the next message.
    const auto next = aligned_.find(which + 1);
    const std::size_t most = next != aligned_.end() ? next->second.begin : text_.size();
    for (const Control& control : controls_)
      if (control.begin >= part.end && control.end <= most && control.token == end_.token)
        return {part.begin, control.end};
    return {part.begin, end_of(part.end)};
  }

  /// Where what asks for it ends, if that stands in front of its text.
  std::size_t begin_of(std::size_t which, std::size_t text_begin) {
    // The text that asks for an answer is the same for all, as a rule, behind the special token in front of
    // it.
    const auto behind =
        std::upper_bound(controls_.begin(), controls_.end(), text_begin,
                         [](std::size_t at, const Control& control) { return at < control.end; });
    const std::size_t last = behind == controls_.begin() ? 0 : std::prev(behind)->end;
    if (asks_ && last > before_ && text_.substr(last, text_begin - last).starts_with(*asks_))
      return last + asks_->size();
    const std::string asked = render(which, true);
    if (asked.empty()) return text_begin;
    if (asked.size() > text_begin || !text_.starts_with(asked)) {
      // The template asks in other words than the text has, as with a thought to go on from: the answer
      // begins where the two part, behind the question.
      const auto question = which > 0 ? aligned_.find(which - 1) : aligned_.end();
      if (question == aligned_.end()) return text_begin;
      const std::size_t from = question->second.end, same = common_front(text_, from, by_.lead, controls_);
      return same > from ? std::min(same, text_begin) : text_begin;
    }
    if (!asks_ && last > before_ && last <= asked.size())
      asks_ = std::string(text_.substr(last, asked.size() - last));
    return asked.size();
  }

  std::string render(std::size_t count, bool asks) const {
    try {
      return written_.text(count, asks);
    } catch (const Error&) {  // nobody can ask for it, as for an answer that comes first; or end there
      return {};
    }
  }

  WrittenConversation& written_;
  const TemplateRun& by_;
  std::string_view text_;
  const std::vector<Control>& controls_;
  const AnswerEnd& end_;
  std::map<std::size_t, jinja::Generated> aligned_;
  std::size_t before_ = 0;           ///< where the answer before ends
  std::optional<std::string> asks_;  ///< what stands behind the token in front of an answer, and asks for it
};

}  // namespace

std::size_t behind_end(std::string_view text, std::size_t at, const std::vector<Control>& controls,
                       const AnswerEnd& end) {
  for (const Control& control : controls)
    if (control.begin >= at) {
      if (!is_space_alone(text.substr(at, control.begin - at))) break;
      // Several may end a turn together.
      at = control.end;
      for (const Control& next : controls)
        if (next.begin == at &&
            std::find(end.closing.begin(), end.closing.end(), next.token) != end.closing.end())
          at = next.end;
      return at;
    }
  for (const std::string& written : end.texts)
    if (text.substr(at).starts_with(written)) return at + written.size();
  return at;
}

std::vector<jinja::Generated> find_answers(WrittenConversation& written, const TemplateRun& by,
                                           const std::vector<ChatMessage>& messages, std::string_view text,
                                           const std::vector<Control>& controls, const AnswerEnd& end) {
  std::vector<jinja::Generated> out;
  std::optional<AnswerFinder> finder;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (!is_answer(messages[i]) || !messages[i].learned) continue;
    if (!finder) finder.emplace(written, by, text, controls, end);
    finder->find(i, out);
  }
  return out;
}

std::optional<std::size_t> dropped_message(const WrittenConversation& written) {
  try {
    std::vector<std::size_t> marked;
    const std::string text = written.numbered(marked);
    for (const std::size_t i : marked)
      if (text.find(WrittenConversation::numbered_mark(i)) == std::string::npos) return i;
  } catch (const Error&) {  // of a text that it takes apart
  }
  return std::nullopt;
}

}  // namespace sherd::data
