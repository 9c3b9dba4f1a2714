#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "models/gguf/gguf_file.h"

namespace sherd::models {

/// The tokenizer that a file is to have: one of three, and what stands beside it.
struct GgufTokenizer {
  std::string json;           ///< a tokenizer.json's text, with all tokens
  std::string sentencepiece;  ///< or a SentencePiece model's bytes
  /// Or a token for each byte, and behind them one that ends a document.
  bool bytes = false;
  /// The text of a file of the model's folder, as tokenizer_config.json; empty: there is none.
  std::function<std::string(const std::string& name)> beside;
  std::int64_t ids = 0;          ///< rows of the model's table of tokens
  std::int64_t token_types = 0;  ///< of an encoder
  bool of_encoder = false;       ///< it reads texts for a decoder
};

/// Appends tokenizer.ggml.*, and the chat template. Throws Error{config} for a tokenizer whose ids llama.cpp
/// would not find, naming the part at fault; a part that matters to rare texts alone is a warning.
void describe_tokenizer(GgufMetadata& to, const GgufTokenizer& tokenizer);

}  // namespace sherd::models
