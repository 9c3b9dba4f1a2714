#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "data/hugging_face/segmentation/byte_trie.h"
#include "data/hugging_face/steps/steps.h"

namespace sherd::data {

/// A token that is looked for in the text itself, before the model sees it.
struct AddedToken {
  std::int32_t id = 0;
  std::string content = {};
  bool single_word = false;             ///< not within a word (is_word())
  bool lstrip = false, rstrip = false;  ///< takes the white space before, behind it along
  bool normalized = true;  ///< looked for in what the normalizer makes of the text, else before that
  bool special = false;    ///< stands for nothing in decoded text
};

/// Finds added tokens, of several at a place the longest. Immutable.
class AddedTokens {
 public:
  struct Found {
    const AddedToken* token;
    std::size_t begin, end;
  };

  /// `normalizer` may be null.
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer* normalizer);

  /// All tokens in `text`, from left to right: those with `normalized` as given. Without `special`, text that
  /// such a token covers stays text.
  void find(std::string_view text, bool normalized, bool special, std::vector<Found>& found) const;

  /// The token with that content, or id; null: none.
  const AddedToken* named(std::string_view content) const;
  const AddedToken* of_id(std::int32_t id) const;
  /// The text as decoding reads it: the content, normalised where it is looked for so.
  const std::string& written(const AddedToken& token) const;
  /// The special tokens that are looked for in what the normalizer makes of a text.
  std::vector<const AddedToken*> normalized_specials() const;
  bool is_special(std::string_view text) const { return special_.contains(std::string(text)); }
  std::int32_t end() const { return end_; }

 private:
  std::vector<AddedToken> tokens_;
  std::vector<std::string> written_;  // each token's text in decoding
  ByteTrie plain_, normalized_;
  std::unordered_map<std::string, std::size_t> by_content_;
  std::unordered_map<std::int32_t, std::size_t> by_id_;
  std::unordered_set<std::string> special_;
  std::vector<std::size_t> normalized_specials_;
  std::int32_t end_ = 0;
};

}  // namespace sherd::data
