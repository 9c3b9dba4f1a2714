#pragma once

#include <functional>
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

}  // namespace sherd::data
