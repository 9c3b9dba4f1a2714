#include "data/hugging_face/segmentation/bpe.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

constexpr std::size_t longest_short = 32;  // characters; beyond, a heap is faster

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}
std::int32_t id_of(std::uint64_t made) {
  return static_cast<std::int32_t>(made & 0xFFFFFFFFu);
}

std::size_t hash_pair(std::uint64_t pair) {
  pair *= 0x9E3779B97F4A7C15u;
  return static_cast<std::size_t>(pair ^ pair >> 32);
}

std::int32_t token_of(const Vocabulary& vocabulary, const std::string& token, const char* what) {
  const std::optional<std::int32_t> id = vocabulary.id(token);
  if (!id) fail(ErrorKind::data, what, " '", excerpt(token), "' is not in the vocabulary");
  return *id;
}

}  // namespace

Bpe::Bpe(const BpeParts& parts)
    : WordModel(Vocabulary(parts.vocabulary)),
      merges_(std::bit_ceil(2 * parts.merges.size() + 2)),
      fuse_unknown_(parts.fuse_unknown),
      byte_fallback_(parts.byte_fallback),
      ignore_merges_(parts.ignore_merges),
      byte_level_(parts.byte_level) {
  if (!parts.unknown.empty()) unknown_ = token_of(vocabulary_, parts.unknown, "the unknown token");
  const bool crosses = add_merges(parts);
  find_bytes(parts);
  // Where a character has neither a token nor bytes nor the unknown one, it vanishes, and its neighbours
  // meet.
  const bool keeps_all = unknown_ >= 0 || (byte_fallback_ && all_bytes_);
  by_words_ = !byte_level_ && !ignore_merges_ && !crosses && keeps_all && vocabulary_.id(space_mark);
}

bool Bpe::add_merges(const BpeParts& parts) {
  bool crosses = false;
  std::string result;
  for (std::size_t rank = 0; rank < parts.merges.size(); ++rank) {
    const auto& [left, right] = parts.merges[rank];
    const std::int32_t left_id = token_of(vocabulary_, left, "of a merge"),
                       right_id = token_of(vocabulary_, right, "of a merge");
    result.assign(left).append(right);
    const std::int32_t id = token_of(vocabulary_, result, "what a merge makes,");
    crosses = crosses || (right.starts_with(space_mark) && !left.ends_with(space_mark));
    const std::uint64_t pair = pair_of(left_id, right_id);
    std::size_t slot = hash_pair(pair) & (merges_.size() - 1);
    while (merges_[slot].pair != no_merge && merges_[slot].pair != pair)
      slot = (slot + 1) & (merges_.size() - 1);
    merges_[slot] = {pair, static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint32_t>(id)};
  }
  return crosses;
}

void Bpe::find_bytes(const BpeParts& parts) {
  bytes_.fill(-1);
  if (parts.byte_fallback && !parts.byte_level) bytes_ = fallback_tokens(vocabulary_);
  for (int byte = 0; byte < 256 && parts.byte_level; ++byte) {
    std::string token;
    append_utf8(written_byte(static_cast<unsigned char>(byte)), token);
    bytes_[static_cast<std::size_t>(byte)] = vocabulary_.id(token).value_or(-1);
  }
  all_bytes_ = std::count(bytes_.begin(), bytes_.end(), -1) == 0;
  if (byte_level_ && byte_fallback_ && !all_bytes_)
    fail(ErrorKind::data, "a byte-level vocabulary that lacks bytes, with byte_fallback, is not read");
}

std::uint64_t Bpe::merge_of(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  const std::size_t mask = merges_.size() - 1;
  for (std::size_t slot = hash_pair(pair) & mask;; slot = (slot + 1) & mask) {
    if (merges_[slot].pair == pair) return merges_[slot].made;
    if (merges_[slot].pair == no_merge) return no_merge;
  }
}

void Bpe::encode(std::string_view piece, BpeSpace& space, std::vector<std::int32_t>& ids) const {
  while (by_words_) {
    std::size_t end = piece.find(space_mark, 1);
    while (end != std::string_view::npos && piece.substr(0, end).ends_with(space_mark))
      end = piece.find(space_mark, end + 1);
    if (end == std::string_view::npos) break;
    WordModel::encode(piece.substr(0, end), space, ids);
    piece.remove_prefix(end);
  }
  if (!piece.empty()) WordModel::encode(piece, space, ids);
}

void WordModel::encode(std::string_view word, BpeSpace& space, std::vector<std::int32_t>& ids) const {
  if (space.cache.find(word, ids)) return;
  encode_word(word, space);
  ids.insert(ids.end(), space.ids.begin(), space.ids.end());
  space.cache.insert(word, space.ids);
}

void Bpe::encode_word(std::string_view word, BpeSpace& space) const {
  space.ids.clear();
  std::string_view written = word;
  if (byte_level_ && (ignore_merges_ || !all_bytes_)) written = written_bytes(word, space.written);
  if (ignore_merges_)
    if (const std::optional<std::int32_t> id = vocabulary_.id(written)) return void(space.ids.push_back(*id));
  if (byte_level_ && all_bytes_)
    for (const char c : word) space.ids.push_back(bytes_[static_cast<unsigned char>(c)]);
  else
    take_characters(written, space);
  if (space.ids.size() <= longest_short)
    merge_short(space);
  else
    merge_long(space);
}

void Bpe::take_characters(std::string_view word, BpeSpace& space) const {
  bool pending = false;  // an unknown character, which goes in front of the next token that is none's bytes
  for (std::size_t length = 0; !word.empty(); word.remove_prefix(length)) {
    length = utf8_length(word);
    const std::string_view character = word.substr(0, length);
    if (const std::optional<std::int32_t> id = vocabulary_.id(character)) {
      if (pending) space.ids.push_back(unknown_);
      pending = false;
      space.ids.push_back(*id);
      continue;
    }
    const auto has_token = [&](char c) { return bytes_[static_cast<unsigned char>(c)] >= 0; };
    if (byte_fallback_ && std::all_of(character.begin(), character.end(), has_token)) {
      for (const char c : character) space.ids.push_back(bytes_[static_cast<unsigned char>(c)]);
      continue;
    }
    if (unknown_ < 0) continue;
    if (pending && !fuse_unknown_) space.ids.push_back(unknown_);
    pending = true;
  }
  if (pending) space.ids.push_back(unknown_);
}

void Bpe::merge_short(BpeSpace& space) const {
  std::vector<std::int32_t>& ids = space.ids;
  std::vector<std::uint64_t>& made = space.made;
  if (ids.size() < 2) return;
  made.resize(ids.size() - 1);
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) made[i] = merge_of(ids[i], ids[i + 1]);
  while (!made.empty()) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < made.size(); ++i)
      if (made[i] >> 32 < made[best] >> 32) best = i;
    if (made[best] == no_merge) return;
    ids[best] = id_of(made[best]);
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    made.erase(made.begin() + static_cast<std::ptrdiff_t>(best));
    if (best > 0) made[best - 1] = merge_of(ids[best - 1], ids[best]);
    if (best < made.size()) made[best] = merge_of(ids[best], ids[best + 1]);
  }
}

void Bpe::merge_long(BpeSpace& space) const {
  using Candidate = BpeSpace::Candidate;
  std::vector<BpeSpace::Symbol>& symbols = space.symbols;
  std::vector<Candidate>& heap = space.heap;
  const auto last = static_cast<std::int32_t>(space.ids.size()) - 1;
  symbols.clear(), heap.clear();
  for (std::int32_t i = 0; i <= last; ++i)
    symbols.push_back({space.ids[static_cast<std::size_t>(i)], i - 1, i < last ? i + 1 : -1});
  const auto symbol = [&](std::int32_t at) -> BpeSpace::Symbol& {
    return symbols[static_cast<std::size_t>(at)];
  };
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto consider = [&](std::int32_t at) {
    if (at < 0 || symbol(at).next < 0) return false;
    const std::int32_t left = symbol(at).id, right = symbol(symbol(at).next).id;
    const std::uint64_t made = merge_of(left, right);
    if (made == no_merge) return false;
    heap.push_back({static_cast<std::uint32_t>(made >> 32), at, left, right});
    return true;
  };
  for (std::int32_t i = 0; i < last; ++i) consider(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Candidate best = heap.back();
    heap.pop_back();
    BpeSpace::Symbol& left = symbol(best.at);
    // A pair that changed since is known by its ids; a symbol that merged into its left neighbour has the id
    // -1.
    if (left.id != best.left || left.next < 0 || symbol(left.next).id != best.right) continue;
    left.id = id_of(merge_of(best.left, best.right));
    symbol(left.next).id = -1;
    left.next = symbol(left.next).next;
    if (left.next >= 0) symbol(left.next).previous = best.at;
    if (consider(left.previous)) std::push_heap(heap.begin(), heap.end(), later);
    if (consider(best.at)) std::push_heap(heap.begin(), heap.end(), later);
  }
  space.ids.clear();
  for (std::int32_t at = 0; at >= 0; at = symbol(at).next) space.ids.push_back(symbol(at).id);
}

}  // namespace sherd::data
