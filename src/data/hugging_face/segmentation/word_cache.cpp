#include "data/hugging_face/segmentation/word_cache.h"

#include "data/hugging_face/segmentation/vocabulary.h"

namespace sherd::data {
namespace {

constexpr std::size_t slots = std::size_t{1} << 17, most_words = slots / 2;
constexpr std::size_t longest_word = 64, most_text = std::size_t{4} << 20;

std::uint64_t hash_of(std::string_view word) {
  return hash_bytes(word) | 1;
}

}  // namespace

std::size_t WordCache::slot_of(std::uint64_t hash, std::string_view word) const {
  std::size_t slot = hash >> 1 & (slots - 1);
  for (; entries_[slot].hash != 0; slot = (slot + 1) & (slots - 1)) {
    const CachedWord& entry = entries_[slot];
    if (entry.hash == hash && std::string_view(text_).substr(entry.text, entry.length) == word) break;
  }
  return slot;
}

bool WordCache::find(std::string_view word, std::vector<std::int32_t>& ids) const {
  if (entries_.empty() || word.size() > longest_word) return false;
  const CachedWord& entry = entries_[slot_of(hash_of(word), word)];
  if (entry.hash == 0) return false;
  const auto first = ids_.begin() + entry.ids;
  ids.insert(ids.end(), first, first + entry.count);
  return true;
}

void WordCache::insert(std::string_view word, std::span<const std::int32_t> ids) {
  if (word.size() > longest_word) return;
  if (entries_.empty() || used_ >= most_words || text_.size() > most_text) {
    entries_.assign(slots, {});
    text_.clear(), ids_.clear();
    used_ = 0;
  }
  const std::uint64_t hash = hash_of(word);
  CachedWord& entry = entries_[slot_of(hash, word)];
  if (entry.hash != 0) return;
  entry = {hash, static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(ids_.size()),
           static_cast<std::uint16_t>(word.size()), static_cast<std::uint16_t>(ids.size())};
  text_ += word;
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++used_;
}

}  // namespace sherd::data
