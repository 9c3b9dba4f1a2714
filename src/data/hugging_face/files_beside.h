#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace sherd::data {

/// The text of a file beside another; empty where there is none of that name.
using FilesBeside = std::function<std::string(const std::string& name)>;

/// A tokenizer.json with the tokens that only the files beside it name, as transformers adds them when it
/// loads a folder: `added_tokens_decoder` of tokenizer_config.json, else added_tokens.json; then the special
/// tokens of tokenizer_config.json and special_tokens_map.json (bos, eos, unk, sep, pad, cls, mask, and
/// lists of more). A token that the vocabulary has keeps its id; another gets the next free one, whatever id
/// the file says. Those of the first two files replace what the tokenizer.json says of a token. The bytes as
/// they came where nothing is to be added, or the file is no such JSON. Throws Error{data} naming a file
/// beside it that is none.
std::string with_tokens_beside(std::string tokenizer_json, const FilesBeside& beside);

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
