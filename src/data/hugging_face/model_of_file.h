#pragma once

#include <nlohmann/json.hpp>

#include "data/hugging_face/tokenizer_file.h"

namespace sherd::data {

/// Reads a tokenizer.json's `model`. Throws Error{data} naming what is not supported.
void read_model(const nlohmann::json& model, TokenizerFile& out);

}  // namespace sherd::data
