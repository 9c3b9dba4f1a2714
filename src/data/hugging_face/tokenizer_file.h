#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/hugging_face/added_tokens.h"
#include "data/hugging_face/segmentation/bpe.h"
#include "data/hugging_face/segmentation/unigram.h"
#include "data/hugging_face/segmentation/word_piece.h"
#include "data/hugging_face/steps/steps.h"

namespace sherd::data {

/// The contents of a tokenizer.json.
struct TokenizerFile {
  BpeParts model;
  std::optional<WordPieceOptions> word_piece;  ///< the model is WordPiece, with the vocabulary of `model`
  std::optional<UnigramOptions> unigram;       ///< or a unigram model
  std::vector<AddedToken> added;
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  std::optional<std::vector<DecoderStep>> decoder;  ///< none: tokens with spaces between them
  std::string token_of(std::int64_t id) const;      ///< its text; empty: no token has the id
  std::string begin, end;  ///< the tokens that the post-processor puts around a text; empty: none
};

/// Reads the file's bytes. Every key is honoured, or known not to change ids or texts (padding, truncation,
/// offsets), or refused by name: Error{data}.
TokenizerFile parse_tokenizer_file(const std::string& bytes);

}  // namespace sherd::data
