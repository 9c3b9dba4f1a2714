#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "engine/checkpoint/checkpoint.h"

namespace sherd::cli {

/// Copies the tokenizer and settings that the model came with, or else the tokenizer that it was trained
/// with; a model that has come to have more ids, `ids`, has the latter. Returns the text of the config.json
/// among them; empty: none.
std::string copy_companions(const engine::CheckpointReader& reader, std::int64_t ids,
                            const std::filesystem::path& to);

}  // namespace sherd::cli
