#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/families/family.h"
#include "models/gguf/gguf_file.h"
#include "models/gpt_config.h"

namespace sherd::models {

/// Throws Error{config} naming what of a resolved model llama.cpp's graph of its family does not compute.
void require_gguf(const GptConfig& model, const Family& family);

/// Appends the keys that describe a resolved model, behind its architecture.
void describe_gguf(GgufMetadata& to, const GptConfig& model, const Family& family);

/// What files say of positions that metadata has no room for: factors of the pairs of a head, by name.
std::vector<std::pair<std::string, std::vector<float>>> position_tensors(const GptConfig& model,
                                                                         const Family& family);

/// What will be computed a little otherwise, or not as far; to be told.
std::vector<std::string> gguf_notes(const GptConfig& model);

}  // namespace sherd::models
