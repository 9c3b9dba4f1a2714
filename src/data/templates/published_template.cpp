#include "data/templates/published_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

/// The text that one of ours writes behind a document's beginning.
std::string flat(std::span<const TextSegment> segments, const Tokenizer& tokenizer) {
  const std::vector<std::string> begins = begin_tokens(tokenizer);
  const auto is_begin = [&](const TextSegment& segment) {
    return segment.kind == SegmentKind::begin ||
           std::find(begins.begin(), begins.end(), segment.text) != begins.end();
  };
  if (!segments.empty() && is_begin(segments.front())) segments = segments.subspan(1);
  std::string out;
  for (const TextSegment& segment : segments)
    out += segment.kind == SegmentKind::end ? tokenizer.token(tokenizer.end_of_document()) : segment.text;
  return out;
}

/// The texts that one of ours writes for a message of each kind, and in front of an answer.
struct Units {
  std::vector<std::string> messages;
  std::string user, answer, both, any_role, question;

  Units(ChatTemplate which, const Tokenizer& tokenizer) {
    const std::string text(content_mark);
    const ChatMessage system{"system", text}, says{"user", text}, answers{"assistant", text};
    const auto write = [&](const std::vector<ChatMessage>& talk) {
      return flat(render(which, tokenizer, talk), tokenizer);
    };
    user = write({says});
    answer = write({says, answers}).substr(user.size());
    question = flat(render_question(which, tokenizer, std::vector{says}), tokenizer).substr(user.size());
    both = write({system, says});
    messages = {user, answer, write({system}), both};
    const auto with_role = [](const std::string& unit, std::string_view role) {
      const std::size_t at = unit.find(role);
      return at == std::string::npos ? std::string()
                                     : cat(unit.substr(0, at), role_mark, unit.substr(at + role.size()));
    };
    any_role = with_role(user, "user");
    if (any_role != with_role(answer, "assistant")) any_role.clear();
    messages.push_back(any_role);
    std::erase(messages, "");
    std::sort(messages.begin(), messages.end(),
              [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  }

  /// How much of `written` is as units say; all of it where it says the same, and leaves nothing out.
  std::size_t matched(std::string_view written) const {
    std::size_t at = 0;
    bool asks = false, replies = false;
    for (bool found = true; found;) {
      found = false;
      const std::string_view rest = written.substr(at);
      if (rest == question && asks && replies) return written.size();
      for (const std::string& unit : messages) {
        if (!rest.starts_with(unit)) continue;
        asks = asks || unit == user || unit == both || unit == any_role,
        replies = replies || unit == answer || unit == any_role;
        at += unit.size(), found = true;
        break;
      }
    }
    if (at == written.size()) return at - 1;  // nothing more comes, and something should
    std::size_t alike = 0;
    for (const std::string& unit : {user, answer, both, any_role, question}) {
      std::size_t same = 0;
      while (same < unit.size() && at + same < written.size() && unit[same] == written[at + same]) ++same;
      alike = std::max(alike, same);
    }
    return std::min(at + alike, written.size() - 1);
  }
};

std::string shown(std::string_view written) {
  std::string out;
  for (std::size_t i = 0; i < written.size(); ++i) {
    const char c = written[i];
    if (c == '\x01')
      out += i > 0 && written[i - 1] == '\x1c' ? "{content}" : "{content | trim}";
    else if (c != '\x1c' && c != '\x05')
      out += c == '\x02' ? std::string("{role}") : c == '\x03' ? std::string("{…}") : std::string(1, c);
  }
  return out;
}

struct Match {
  ChatTemplate which = ChatTemplate::plain;
  std::size_t matched = 0;
  std::string written;
  bool whole() const { return !written.empty() && matched == written.size(); }
};

/// The one of ours that goes furthest.
Match closest(std::string_view jinja, const Tokenizer& tokenizer) {
  Match best;
  best.written = written_by(jinja, tokenizer);
  if (best.written.starts_with(begin_mark)) best.written.erase(0, begin_mark.size());
  for (const ChatTemplate which :
       {ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::mistral, ChatTemplate::plain}) {
    if (jinja == jinja_of(which, tokenizer)) return {which, best.written.size(), best.written};
    const std::size_t matched = best.written.empty() ? 0 : Units(which, tokenizer).matched(best.written);
    if (matched > best.matched) best.which = which, best.matched = matched;
  }
  return best;
}

/// The one whose first token is written anywhere.
std::optional<ChatTemplate> kin_of(std::string_view jinja) {
  const auto has = [&](std::string_view part) { return jinja.find(part) != std::string_view::npos; };
  if (has("<|im_start|>")) return ChatTemplate::chatml;
  if (has("<|start_header_id|>")) return ChatTemplate::llama3;
  if (has("[INST]")) return ChatTemplate::mistral;
  return std::nullopt;
}

}  // namespace

std::string published_template(std::string jinja_file, const std::string& tokenizer_config) {
  if (!jinja_file.empty()) return jinja_file;
  const auto settings = nlohmann::json::parse(tokenizer_config, nullptr, /*allow_exceptions=*/false);
  if (!settings.is_object() || !settings.contains("chat_template")) return {};
  const nlohmann::json& found = settings["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  if (found.is_array())
    for (const nlohmann::json& named : found)
      if (named.is_object() && named.contains("name") && named["name"] == "default" &&
          named.contains("template") && named["template"].is_string())
        return named["template"].get<std::string>();
  return {};
}

ChatTemplate require_template(std::string_view jinja, const Tokenizer& tokenizer, const std::string& whose) {
  const Match match = closest(jinja, tokenizer);
  if (match.whole()) return match.which;
  const ChatTemplate near = kin_of(jinja).value_or(match.which);
  const std::size_t same = match.which == near ? match.matched : 0;
  const std::string_view written = match.written;
  const std::string before = shown(written.substr(0, same).substr(same > 40 ? same - 40 : 0));
  fail(ErrorKind::config, "the chat template that ", whose,
       " came with is none of chatml, llama3, mistral and plain: it is closest to ", name_of(near), ", but ",
       before.empty() ? "" : cat("behind '", excerpt(before), "' "), "writes '",
       excerpt(shown(written.substr(same)), 120), "'; give --chat-template ", name_of(near),
       " (or another) to have conversations written in that way all the same, or write texts of your own "
       "(`prompt` and `completion`)");
}

}  // namespace sherd::data
