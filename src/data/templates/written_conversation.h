#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/jinja/template.h"
#include "data/templates/chat_template.h"

// A conversation as one template writes it, with marks that tell what is the template's own. Used by
// chat_template.cpp and answers.cpp alone.
namespace sherd::data {

// Marks in a template's input: characters that no text has, noncharacters of Unicode.
/// Stands within a special token that a message spells out.
inline constexpr std::string_view mark_apart = "\xef\xb7\x90";
/// Stands in the place of a message.
inline constexpr std::string_view mark_answer = "\xef\xb7\x91";
/// Stands for the end of a document that has no text.
inline constexpr std::string_view mark_end = "\xef\xb7\x92";

/// How a template takes the text of a message: some take a list of parts alone, some nothing else.
enum class Content : std::uint8_t { either, text, parts };

/// A template with what it takes to write a conversation by it, and to tell the parts of the text.
struct TemplateRun {
  jinja::Template runs;
  jinja::Dict tokens;  ///< names of special tokens
  const Tokenizer& tokenizer;
  std::vector<std::string> controls;  ///< tokens of one of the four, whether the tokenizer has them or not
  Content content = Content::either;
  std::string lead = {};  ///< what stands between a question and where its answer begins
};

/// A special token in a text: where it stands, and what it takes along of the white space around.
struct Control {
  std::string token;
  std::size_t begin, end, first, last;  ///< the token; with white space
};
/// From left to right; none within another.
std::vector<Control> controls_in(const TemplateRun& by, std::string_view text);

bool is_answer(const ChatMessage& message);
bool is_space_alone(std::string_view text);

/// `by` must outlive it.
class WrittenConversation {
 public:
  /// Throws Error{data} for a text with such a mark.
  WrittenConversation(const TemplateRun& by, const Conversation& conversation);

  /// Throws Error{data} where the template does. `marked`: what {% generation %} encloses.
  std::string text(bool asks, std::vector<jinja::Generated>* marked = nullptr) const {
    return text(messages_.size(), asks, marked);
  }
  /// The text of the first `count` messages.
  std::string text(std::size_t count, bool asks, std::vector<jinja::Generated>* marked = nullptr) const;
  /// The text where message `which` says `content` alone.
  std::string with(std::size_t which, const std::string& content, bool asks = false);
  /// The text with another answer in the place of message `which`.
  std::string with_another(std::size_t which) { return with(which, std::string(mark_answer)); }
  /// The text with other arguments in the tool calls of message `which`, or with another text in it. Calls
  /// keep their names and ids, to which later messages may refer.
  std::string with_other_calls(std::size_t which);
  std::string with_other_content(std::size_t which);
  bool calls(std::size_t which) const { return messages_[which].find("tool_calls") != nullptr; }
  bool says(std::size_t which) const {
    const jinja::Value* content = messages_[which].find("content");
    return content && content->is_true();
  }

  /// The text with numbered_mark(i) in place of the text of each message i that has one; `which` gets these
  /// i.
  std::string numbered(std::vector<std::size_t>& which) const;
  static std::string numbered_mark(std::size_t which);
  /// Throws Error{data} where some of the special tokens in text(asks) come from messages, of whose texts the
  /// template put parts together.
  void require_own_controls(const std::vector<Control>& controls, bool asks) const;

 private:
  std::string with_message(std::size_t which, jinja::Value message, bool asks = false);
  jinja::Value saying(const jinja::Value& message, const std::string& content) const;
  jinja::Value as_taken(const jinja::Value& content, const std::string& text) const;
  jinja::Value guarded(const jinja::Value& value) const;
  std::string guarded(const std::string& text) const;

  const TemplateRun& by_;
  jinja::List messages_;
  jinja::Dict names_;
};

/// The parts of a text, of which `learned` are, without marks.
std::vector<TextSegment> segments_of(std::string_view text, const std::vector<Control>& controls,
                                     const std::vector<jinja::Generated>& learned);

}  // namespace sherd::data
