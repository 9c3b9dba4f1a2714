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

/// The one of ours that writes what `jinja` writes, byte for byte, of a few conversations: with and without a
/// system's text, of one turn and several, asking for an answer and not, with white space at the ends of
/// texts. Conversations that it refuses (raise_exception()) are left out; what a tokenizer begins documents
/// with may be missing in either. Throws Error{config} where there is none, or Sherd cannot run the template,
/// saying which of ours comes closest, from where on it differs, and how to take it all the same. `whose`:
/// "the model", "the tokenizer".
ChatTemplate require_template(std::string_view jinja, const Tokenizer& tokenizer, const std::string& whose);

}  // namespace sherd::data
