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

/// Facts on positions that files hold as tensors, by name: a factor for each pair of a head.
std::vector<std::pair<std::string, std::vector<float>>> position_tensors(const GptConfig& model,
                                                                         const Family& family);

/// Notes for the user: what llama.cpp computes a little otherwise, or not at all.
std::vector<std::string> gguf_notes(const GptConfig& model);

}  // namespace sherd::models
