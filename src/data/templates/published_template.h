#pragma once

#include <string>
#include <string_view>

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

}  // namespace sherd::data
