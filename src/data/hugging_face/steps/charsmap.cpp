#include "data/hugging_face/steps/charsmap.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/cluster.h"

namespace sherd::data {
namespace {

constexpr std::size_t whole_clusters_below = 6;  // bytes

int value_in_base64(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

std::string from_base64(std::string_view text) {
  std::size_t padding = 0;
  for (; padding < 2 && text.ends_with('='); ++padding) text.remove_suffix(1);
  std::string out;
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int value = value_in_base64(text[i]);
    if (value < 0) fail(ErrorKind::data, "precompiled_charsmap has a byte ", i, " that is no base64");
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    if (i % 4 != 0) out.push_back(static_cast<char>(bits >> (6 - 2 * (i % 4))));
  }
  if ((text.size() + padding) % 4 != 0) fail(ErrorKind::data, "precompiled_charsmap is cut off");
  return out;
}

std::size_t characters_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// A unit of the array is a node of the trie.
bool has_text(std::uint32_t unit) {
  return (unit >> 8 & 1) != 0;
}
std::uint32_t label_of(std::uint32_t unit) {
  return unit & (0x80000000u | 0xFFu);
}
std::uint32_t offset_of(std::uint32_t unit) {
  return unit >> 10 << ((unit & 0x200u) >> 6);
}

/// Counts the bytes of the result that the package says were made of the first `of_first` bytes of `text`. It
/// says so of characters one by one: each replaces the next one of the text, or is an addition to the one
/// before, or takes some behind it away. Those that vanish at the front are not counted, and what comes
/// behind them is said to be made of them.
class MadeOfFirst {
 public:
  MadeOfFirst(std::string_view text, std::size_t of_first) : text_(text), of_first_(of_first) {}

  void replaced(std::string_view from, std::string_view to) {
    if (at_ > of_first_) return;
    const std::size_t before = characters_of(from), after = characters_of(to);
    for (std::size_t i = 0; !to.empty() && at_ <= of_first_; ++i) {
      settle();
      const std::size_t bytes = utf8_length(to);
      last_ = {bytes, 0, i >= before};
      to.remove_prefix(bytes);
    }
    if (after < before && last_.bytes > 0) last_.takes += before - after;
  }
  std::size_t bytes() {
    settle();
    return bytes_;
  }

 private:
  struct Character {
    std::size_t bytes = 0, takes = 0;
    bool adds = false;
  };
  void settle() {
    if (last_.bytes == 0) return;
    // An addition that takes one away replaces it.
    const bool adds = last_.adds && last_.takes == 0;
    if (adds ? at_ <= of_first_ : at_ < of_first_) bytes_ += last_.bytes;
    std::size_t used = last_.takes + (last_.adds ? 0 : 1);
    for (; used > 0 && at_ < text_.size(); --used) at_ += utf8_length(text_.substr(at_));
    last_ = {};
  }

  std::string_view text_;
  std::size_t of_first_, at_ = 0, bytes_ = 0;
  Character last_;
};

}  // namespace

struct Charsmap::Result {
  std::string& out;
  MadeOfFirst first;
  bool changed = false;

  void put(std::string_view from, std::optional<std::string_view> to) {
    first.replaced(from, to.value_or(from));
    out.append(to.value_or(from));
    changed = changed || to.has_value();
  }
};

Charsmap::Charsmap(const std::string& base64) {
  const std::string bytes = from_base64(base64);
  const auto number_at = [&](std::size_t at) {
    std::uint32_t number = 0;
    for (std::size_t i = 4; i-- > 0;) number = number << 8 | static_cast<unsigned char>(bytes[at + i]);
    return number;
  };
  const std::size_t of_trie = bytes.size() < 4 ? 0 : number_at(0) / 4 * 4;
  if (of_trie == 0 || of_trie > bytes.size() - 4)
    fail(ErrorKind::data, "precompiled_charsmap has ", bytes.size(), " bytes, which hold no table");
  for (std::size_t at = 0; at < of_trie; at += 4) units_.push_back(number_at(4 + at));
  replacements_ = bytes.substr(4 + of_trie);
  if (invalid_utf8_bytes(replacements_) > 0)
    fail(ErrorKind::data, "precompiled_charsmap has replacements that are no UTF-8");
  for (unsigned char c = 0; c < 0x80; ++c) {
    const char byte = static_cast<char>(c);
    is_plain_[c] = is_plain_in_clusters(byte) && !replacement({&byte, 1});
  }
}

std::optional<std::string_view> Charsmap::replacement(std::string_view part) const {
  const auto unit_at = [&](std::size_t at) {
    if (at >= units_.size()) fail(ErrorKind::data, "precompiled_charsmap leads outside of its trie");
    return units_[at];
  };
  std::uint32_t at = offset_of(units_[0]);
  for (const char c : part) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) return std::nullopt;
    at ^= byte;
    const std::uint32_t unit = unit_at(at);
    if (label_of(unit) != byte) return std::nullopt;
    at ^= offset_of(unit);
    if (!has_text(unit)) continue;
    const std::size_t begin = unit_at(at) & 0x7FFFFFFFu;
    if (begin > replacements_.size() ||
        (begin < replacements_.size() && (static_cast<unsigned char>(replacements_[begin]) & 0xC0) == 0x80))
      fail(ErrorKind::data, "precompiled_charsmap leads outside of its replacements");
    return std::string_view(replacements_).substr(begin, replacements_.find('\0', begin) - begin);
  }
  return std::nullopt;
}

void Charsmap::apply_to_cluster(std::string_view cluster, Result& result) const {
  if (cluster.size() < whole_clusters_below)
    if (const auto whole = replacement(cluster)) return result.put(cluster, whole);
  for (std::size_t bytes = 0; !cluster.empty(); cluster.remove_prefix(bytes)) {
    bytes = utf8_length(cluster);
    const std::string_view character = cluster.substr(0, bytes);
    result.put(character, replacement(character));
  }
}

bool Charsmap::apply(std::string_view text, std::string& out, std::size_t& of_first) const {
  Result result{out, {text, of_first}};
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && is_plain_[static_cast<unsigned char>(text[end])] &&
           (end + 1 == text.size() || is_plain_in_clusters(text[end + 1])))
      ++end;
    if (end > at) {
      result.put(text.substr(at, end - at), std::nullopt);
      at = end;
      continue;
    }
    const std::size_t length = cluster_length(text.substr(at));
    apply_to_cluster(text.substr(at, length), result);
    at += length;
  }
  if (result.changed) of_first = result.first.bytes();
  return result.changed;
}

}  // namespace sherd::data
