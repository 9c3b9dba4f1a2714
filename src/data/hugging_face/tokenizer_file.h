#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/hugging_face/added_tokens.h"
#include "data/hugging_face/bpe.h"
#include "data/hugging_face/decoder.h"
#include "data/hugging_face/normalizer.h"
#include "data/hugging_face/pre_tokenizer.h"

namespace sherd::data {

/// The contents of a tokenizer.json.
struct TokenizerFile {
  BpeParts model;
  std::vector<AddedToken> added;
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  std::optional<std::vector<DecoderStep>> decoder;  ///< none: tokens with spaces between them
  std::string token_of(std::int64_t id) const;      ///< its text; empty: no token has the id
  std::string begin;  ///< the token that the post-processor puts in front of a text; empty: none
};

/// Reads the file's bytes. Every key is honoured, or known not to change ids or texts (padding, truncation,
/// offsets), or refused by name: Error{data}.
TokenizerFile parse_tokenizer_file(const std::string& bytes);

/// A document's ends, as the files beside a tokenizer.json say.
struct DocumentEnds {
  std::string end;                     ///< the token; empty: not told
  std::optional<std::int32_t> end_id;  ///< or its id
  bool without_begin = false;          ///< no token in front of a text, whatever the post-processor says
  std::optional<bool> prefix_space;    ///< tokenizer_config.json's add_prefix_space, which is not followed
};

/// Asks tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json, in this
/// order, for eos_token, or eos_token_id (of several the first); and the first for add_bos_token. Throws
/// Error{data} naming a file that is no JSON.
DocumentEnds document_ends_beside(const std::filesystem::path& folder);

}  // namespace sherd::data
