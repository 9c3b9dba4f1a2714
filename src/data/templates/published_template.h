#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/templates/chat_template.h"

// Chat templates as models are published with them: texts in transformers' language (jinja).

namespace sherd::data {

/// The template of a model's files: the text of chat_template.jinja, else what tokenizer_config.json says
/// under `chat_template` (of several the one named "default"). Empty where neither has one.
std::string published_template(std::string jinja_file, const std::string& tokenizer_config);

/// The one of ours that writes what `jinja` writes: the same texts around roles and contents, in the same
/// order, white space and trimming included. What a tokenizer begins documents with may be missing in either.
/// Conditions are not followed: what stands under any is taken to be written. Throws Error{config} where
/// there is none (also for macros, calls, other filters), saying which of ours comes closest, from where on
/// it differs, and how to take it all the same. `whose`: "the model", "the tokenizer".
ChatTemplate require_template(std::string_view jinja, const Tokenizer& tokenizer, const std::string& whose);

// require_template() finds the text that a template writes without running it. Marks stand for a message's
// parts in what a template writes, in characters that no template holds. A content has white space of its own
// kind at its ends until it is trimmed.
inline constexpr std::string_view content_mark = "\x1c\x01\x1c", role_mark = "\x02", unknown_mark = "\x03",
                                  begin_mark = "\x05";

/// Tokens that stand in front of a document, where they are not its end, too.
std::vector<std::string> begin_tokens(const Tokenizer& tokenizer);

/// Writes out a template from its first to its last line, whatever its conditions, with marks for what
/// messages say: texts, roles, contents and names that were set, joined by + or ~, trimmed or not. A token
/// that begins documents is begin_mark where it is written once, in front of the messages or with the first.
/// All else that writes anything is unknown_mark.
std::string written_by(std::string_view jinja, const Tokenizer& tokenizer);

}  // namespace sherd::data
