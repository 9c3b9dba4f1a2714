#pragma once

#include "data/hugging_face/tokenizer_file.h"

namespace sherd::data {

/// Reads a tokenizer.json's `model`. Throws Error{data} naming what is not supported. Json is nlohmann's,
/// which sources alone know.
template <class Json>
void read_model(const Json& model, TokenizerFile& out);

}  // namespace sherd::data
