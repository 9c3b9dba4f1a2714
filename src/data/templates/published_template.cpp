#include "data/templates/published_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/jinja/template.h"

namespace sherd::data {
namespace {

/// Tokens that stand in front of a document, where they are not its end, too.
std::vector<std::string> begin_tokens(const Tokenizer& tokenizer) {
  std::vector<std::string> out{"<|begin_of_text|>", "<s>"};
  if (const auto id = tokenizer.begin_of_document()) out.push_back(tokenizer.token(*id));
  std::erase(out, "");
  std::erase(out, tokenizer.token(tokenizer.end_of_document()));
  return out;
}

/// Without a token that begins documents.
std::string without_begin(const std::string& text, const Tokenizer& tokenizer) {
  for (const std::string& token : begin_tokens(tokenizer))
    if (text.starts_with(token)) return text.substr(token.size());
  return text;
}

/// The text that one of ours writes.
std::string flat(std::span<const TextSegment> segments, const Tokenizer& tokenizer) {
  std::string out;
  for (const TextSegment& segment : segments)
    out += segment.kind == SegmentKind::end ? tokenizer.token(tokenizer.end_of_document()) : segment.text;
  return without_begin(out, tokenizer);
}

/// A conversation on which templates are compared.
struct Probe {
  std::vector<ChatMessage> messages;
  bool asks = false;  ///< for an answer
};
/// Texts with white space at their ends, and with what templates of models that think take away.
std::vector<Probe> probes() {
  const ChatMessage system{"system", " Be kind.\n "}, user{"user", " Who's </think> there?\n "},
      answer{"assistant", " It's <think> so </think> me.\n "};
  return {{{user}, false},         {{user}, true},
          {{user, answer}, false}, {{user, answer, user}, true},
          {{system, user}, true},  {{system, user, answer, user, answer}, false}};
}

/// What a published template writes; nothing where it refuses the conversation.
std::optional<std::string> written_by(const jinja::Template& published, const Probe& probe,
                                      const Tokenizer& tokenizer) {
  using jinja::Value;
  jinja::List messages;
  for (const ChatMessage& message : probe.messages)
    messages.push_back(Value::dict({{"role", message.role}, {"content", message.content}}));
  const auto begin = tokenizer.begin_of_document();
  try {
    return without_begin(published.render({{"messages", Value::list(std::move(messages))},
                                           {"add_generation_prompt", probe.asks},
                                           {"bos_token", begin ? tokenizer.token(*begin) : std::string()},
                                           {"eos_token", tokenizer.token(tokenizer.end_of_document())},
                                           {"tools", jinja::None{}},
                                           {"documents", jinja::None{}}}),
                         tokenizer);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string written_by(ChatTemplate which, const Probe& probe, const Tokenizer& tokenizer) {
  return flat(probe.asks ? render_question(which, tokenizer, probe.messages)
                         : render(which, tokenizer, probe.messages),
              tokenizer);
}

/// How far one of ours writes the same.
struct Match {
  ChatTemplate which = ChatTemplate::plain;
  bool whole = false;        ///< on all conversations that the published one takes
  std::size_t same = 0;      ///< bytes, of the first text that differs
  std::string written = {};  ///< that text, as the published one writes it
};

Match match_of(ChatTemplate which, const jinja::Template& published, const Tokenizer& tokenizer) {
  int compared = 0;
  for (const Probe& probe : probes()) {
    const std::optional<std::string> theirs = written_by(published, probe, tokenizer);
    if (!theirs) continue;
    ++compared;
    const std::string ours = written_by(which, probe, tokenizer);
    if (*theirs == ours) continue;
    const auto [end, _] = std::mismatch(theirs->begin(), theirs->end(), ours.begin(), ours.end());
    return {which, false, static_cast<std::size_t>(end - theirs->begin()), *theirs};
  }
  return {which, compared > 1};
}

/// The one of ours that goes furthest.
Match closest(const jinja::Template& published, const Tokenizer& tokenizer) {
  Match best;
  for (const ChatTemplate which :
       {ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::mistral, ChatTemplate::plain}) {
    const Match match = match_of(which, published, tokenizer);
    if (match.whole) return match;
    if (match.same > best.same || best.written.empty()) best = match;
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

ChatTemplate require_template(std::string_view text, const Tokenizer& tokenizer, const std::string& whose) {
  const auto advice = [&](ChatTemplate near) {
    return cat(
        "; give --chat-template ", name_of(near),
        " (or another) to have conversations written in that way all the same, or write texts of your own "
        "(`prompt` and `completion`)");
  };
  std::optional<jinja::Template> published;
  try {
    published.emplace(text);
  } catch (const Error& error) {
    fail(ErrorKind::config, "the chat template that ", whose, " came with is not read: ", error.what(),
         advice(kin_of(text).value_or(ChatTemplate::plain)));
  }
  const Match match = closest(*published, tokenizer);
  if (match.whole) return match.which;
  const ChatTemplate near = kin_of(text).value_or(match.which);
  const Match of_near = match.which == near ? match : match_of(near, *published, tokenizer);
  const std::string_view written = of_near.written;
  const std::string_view before =
      written.substr(0, of_near.same).substr(of_near.same > 40 ? of_near.same - 40 : 0);
  fail(ErrorKind::config, "the chat template that ", whose,
       " came with is none of chatml, llama3, mistral and plain: it is closest to ", name_of(near), ", but ",
       before.empty() ? "" : cat("behind '", excerpt(std::string(before), 120), "' "), "writes '",
       excerpt(std::string(written.substr(of_near.same)), 120), "'", advice(near));
}

}  // namespace sherd::data
