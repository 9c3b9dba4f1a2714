#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/templates/chat_template.h"

namespace sherd::data {

/// Whether the special tokens that the texts of segments spell out are these tokens. Of conversations they
/// are not: nobody who is quoted in one can end a turn or speak for another.
enum class SpelledTokens { tokens, text };

/// Appends the ids of the segments to `ids` and, for each, 1 to `learned` where it is a target, else 0. What
/// lies between two tokens of the template is encoded as one text, as transformers does; a token that crosses
/// into a part that is learned, or out of one, is learned, too. Throws Error{data} where a text of a
/// conversation becomes a token of the template, or one that begins or ends documents, whatever is done.
void encode_segments(const Tokenizer& tokenizer, std::span<const TextSegment> segments, SpelledTokens spelled,
                     std::vector<std::int32_t>& ids, std::vector<std::uint8_t>& learned);

}  // namespace sherd::data
