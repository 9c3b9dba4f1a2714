#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// Facts on a vocabulary that GGUF files state and a tokenizer.json implies, derived from the latter.
namespace sherd::models {

using TokenIds = std::unordered_map<std::string, std::int64_t>;
/// Pairs of tokens that become one, in the order in which they are tried.
using TokenMerges = std::vector<std::pair<std::string, std::string>>;

/// How llama.cpp cuts texts into words before byte-level BPE merges.
struct GgufPreTokenizer {
  const char* name;
  bool ignores_merges;  ///< a word that is a token is that token, whatever merges make of it
};
/// The pre-tokenizer that does a sequence of steps: "split REGEX", "digits" (each by itself), "words"
/// (GPT-2's); nullptr: llama.cpp has none. `ignores_merges`: which one is preferred where two do.
const GgufPreTokenizer* pre_tokenizer_of(const std::vector<std::string>& steps, bool ignores_merges);

/// A token that merges do not make of its letters, though it is no token of `added`; empty: they make all.
std::string token_beyond_merges(const TokenIds& ids, const TokenMerges& merges,
                                const std::unordered_set<std::string>& added);

/// Ranks of tokens that stand for the merges: where the two neighbours that together are the token of the
/// lowest rank are merged first, as by SentencePiece's scores, the results are those of the merges. Nothing
/// where no ranks do that; `odd` is then the first token that has none.
std::optional<TokenIds> ranks_of_pieces(const TokenIds& ids, const TokenMerges& merges,
                                        const std::unordered_set<std::string>& added, std::string& odd);

/// The letter by which byte-level BPE writes a byte.
std::string letter_of(int byte);

/// The bytes of base64. Throws Error{data} for any other text.
std::vector<std::uint8_t> bytes_of_base64(std::string_view text);

}  // namespace sherd::models
