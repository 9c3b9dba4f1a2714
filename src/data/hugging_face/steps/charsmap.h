#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::data {

/// The table by which SentencePiece normalizes: a double-array trie (Aoe 1989; of the library Darts-clone) of
/// texts, and what comes in place of each. Applied as the tokenizers package does, which is not as
/// SentencePiece does: a grapheme cluster of less than 6 bytes is looked up as a whole, and becomes what is
/// there for the shortest text that it begins with; of others each character is. Immutable.
class Charsmap {
 public:
  /// Reads the base64 that a tokenizer.json has. Throws Error{data} for any other text.
  explicit Charsmap(const std::string& base64);

  /// False where `text`, valid UTF-8, stays as it is; else the result is in `out`, which was empty.
  /// `of_first` as in Normalizer::apply(). Throws Error{data} where the table leads outside of itself.
  bool apply(std::string_view text, std::string& out, std::size_t& of_first) const;

 private:
  struct Result;
  std::optional<std::string_view> replacement(std::string_view part) const;
  void apply_to_cluster(std::string_view cluster, Result& result) const;

  std::vector<std::uint32_t> units_;
  std::string replacements_;          // each ends with a zero byte
  std::array<bool, 256> is_plain_{};  // characters of ASCII that stay
};

}  // namespace sherd::data
