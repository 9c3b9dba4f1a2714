#include "data/hugging_face/added_tokens.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer* normalizer)
    : tokens_(std::move(tokens)) {
  MatchSpace space;
  std::string storage;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    const bool changes = token.normalized && normalizer != nullptr;
    written_.emplace_back(changes ? normalizer->apply(token.content, storage, space)
                                  : std::string_view(token.content));
    by_content_[token.content] = by_id_[token.id] = i;
    if (token.special) special_.insert(token.content);
    end_ = std::max(end_, token.id + 1);
  }
  std::vector<std::pair<std::string_view, std::int32_t>> plain, normalized;
  // The last of one id counts, as of one content; of several that are normalised to one text the first.
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    if (by_id_.at(tokens_[i].id) != i) continue;
    if (written_[i].empty())
      fail(ErrorKind::data, "the normalizer leaves nothing of the added token '", excerpt(tokens_[i].content),
           "' (normalized), at which the package would cut every text between any two characters; save it "
           "with \"normalized\": false");
    (tokens_[i].normalized ? normalized : plain).emplace_back(written_[i], static_cast<std::int32_t>(i));
    if (tokens_[i].normalized && tokens_[i].special) normalized_specials_.push_back(i);
  }
  plain_ = ByteTrie(std::move(plain)), normalized_ = ByteTrie(std::move(normalized));
}

void AddedTokens::find(std::string_view text, bool normalized, bool special,
                       std::vector<Found>& found) const {
  found.clear();
  const ByteTrie& trie = normalized ? normalized_ : plain_;
  if (trie.empty()) return;
  std::size_t free = 0;  // where what was found last ends, with its white space
  for (std::size_t at = 0; at < text.size();) {
    std::size_t length = 0;
    std::int32_t which = -1;
    trie.for_each_prefix(text.substr(at), [&](std::size_t bytes, std::int32_t token) {
      length = bytes, which = token;  // the longest comes last
    });
    if (which < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(which)];
    std::size_t begin = at, end = at + length;
    at = end;
    if (!special && token.special) continue;
    if (token.single_word && ((begin > 0 && is_word(last_character(text.substr(0, begin)))) ||
                              (end < text.size() && is_word(first_character(text.substr(end))))))
      continue;
    while (token.lstrip && begin > free && is_space(last_character(text.substr(0, begin))))
      begin -= last_length(text.substr(0, begin));
    while (token.rstrip && end < text.size() && is_space(first_character(text.substr(end))))
      end += utf8_length(text.substr(end));
    // A token that takes white space in front of it may begin in what the one before took behind it, and is
    // nothing where it also ends there.
    if (!token.lstrip || std::max(begin, free) < end) found.push_back({&token, std::max(begin, free), end});
    free = end;
  }
}

std::vector<const AddedToken*> AddedTokens::normalized_specials() const {
  std::vector<const AddedToken*> out;
  for (const std::size_t i : normalized_specials_) out.push_back(&tokens_[i]);
  return out;
}

const AddedToken* AddedTokens::named(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::of_id(std::int32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const std::string& AddedTokens::written(const AddedToken& token) const {
  return written_[static_cast<std::size_t>(&token - tokens_.data())];
}

}  // namespace sherd::data
