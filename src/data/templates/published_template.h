#pragma once

#include <optional>
#include <string>

#include "data/hugging_face/files_beside.h"
#include "data/templates/chat_template.h"

// Chat templates as models are published with them.

namespace sherd::data {

/// The template of a model's files: the text of chat_template.jinja, else what tokenizer_config.json says
/// under `chat_template` (of several the one named "default"), with the special tokens that
/// tokenizer_config.json and special_tokens_map.json name; nothing where neither has one. Throws
/// Error{config} for one that Sherd cannot run, saying how to go on without it. `whose`: "the model", "the
/// tokenizer".
std::optional<ChatTemplate> published_template(const FilesBeside& files, const Tokenizer& tokenizer,
                                               const std::string& whose);

/// The template that `--chat-template` names: one of the four, or the file of a template (a path, or a name
/// that ends with .jinja), with the special tokens of those files. Throws Error{config} for others, Error{io}
/// for a file that cannot be read.
ChatTemplate chosen_template(const std::string& name, const FilesBeside& files, const Tokenizer& tokenizer);

}  // namespace sherd::data
