#pragma once

#include <string>

#include "models/gguf/gguf_tokenizer.h"
#include "models/gguf/gguf_vocabulary.h"

namespace sherd::models {

/// The tokens that a tokenizer puts around a text; empty: none.
struct TextEnds {
  std::string begin, end;
};

/// Appends which tokens begin and end texts, and what others are for, as the tokenizer and the files beside
/// it say. `words`: WordPiece's. `usual_end`: the token that ends a text where nobody says it. Throws
/// Error{config} where none does.
void describe_specials(GgufMetadata& to, const GgufTokenizer& tokenizer, const TokenIds& ids, TextEnds around,
                       bool words, const std::string& usual_end = {});

/// Appends the template of conversations that stands beside a tokenizer; of several in a file the usual one.
void describe_template(GgufMetadata& to, const GgufTokenizer& tokenizer);

}  // namespace sherd::models
