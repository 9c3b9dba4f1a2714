#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

// Finds what a chat template in transformers' language (jinja) writes, without running it.

namespace sherd::data {

// Marks stand for a message's parts in what a template writes, in characters that no template holds. A
// content has white space of its own kind at its ends until it is trimmed.
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
