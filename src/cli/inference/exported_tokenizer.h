#pragma once

#include <filesystem>

#include "engine/checkpoint/checkpoint.h"

namespace sherd::cli {

/// Writes beside an exported model what transformers asks for beyond a run's own tokenizer file: which tokens
/// begin and end a text (tokenizer_config.json), what ends generation (generation_config.json) and, of a run
/// on conversations, how they are written (chat_template.jinja). Of a run on conversations, files that came
/// with the weights stay as they are but for that template and for generation_config.json, which gets what
/// ends an answer; of any other run they stay. Nothing is written for a tokenizer that is no tokenizer.json.
void write_tokenizer_settings(const engine::CheckpointReader& reader, const std::filesystem::path& to);

}  // namespace sherd::cli
