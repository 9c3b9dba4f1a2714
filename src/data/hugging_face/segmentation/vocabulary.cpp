#include "data/hugging_face/segmentation/vocabulary.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

constexpr std::int32_t most_ids = 1 << 28;

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

std::uint64_t hash_bytes(std::string_view text) {
  constexpr std::uint64_t factor = 0x9E3779B97F4A7C15u, other = 0xD6E8FEB86659FD93u;
  std::uint64_t hash = factor ^ text.size();
  const char* at = text.data();
  std::size_t left = text.size();
  std::uint64_t eight = 0;
  for (; left >= 8; at += 8, left -= 8) {
    std::memcpy(&eight, at, 8);
    hash = mixed(hash ^ eight, other);
  }
  eight = 0;
  std::memcpy(&eight, at, left);
  return mixed(hash ^ eight, factor);
}

Vocabulary::Vocabulary(const std::vector<std::pair<std::string, std::int32_t>>& tokens, Repeats repeats)
    : slots_(std::bit_ceil(2 * tokens.size() + 2), -1) {
  for (const auto& [token, id] : tokens) {
    if (id < 0 || id >= most_ids)
      fail(ErrorKind::data, "token '", excerpt(token), "' has the id ", id, ", which no model has");
    const std::size_t slot = slot_of(token);
    if (slots_[slot] >= 0 && repeats == Repeats::fault)
      fail(ErrorKind::data, "token '", excerpt(token), "' is there twice");
    if (static_cast<std::size_t>(id) >= places_.size()) places_.resize(static_cast<std::size_t>(id) + 1);
    TokenRange& place = places_[static_cast<std::size_t>(id)];
    if (place.length > 0)
      fail(ErrorKind::data, "two tokens have the id ", id, ", '", excerpt(token), "' one");
    place = {static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(token.size())};
    text_ += token;
    slots_[slot] = id;
  }
}

std::size_t Vocabulary::slot_of(std::string_view token) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = hash_bytes(token) & mask;
  while (slots_[slot] >= 0 && this->token(slots_[slot]) != token) slot = (slot + 1) & mask;
  return slot;
}

std::optional<std::int32_t> Vocabulary::id(std::string_view token) const {
  const std::int32_t found = slots_[slot_of(token)];
  return found < 0 ? std::nullopt : std::optional(found);
}

std::string_view Vocabulary::token(std::int32_t id) const {
  if (id < 0 || id >= end()) return {};
  const TokenRange place = places_[static_cast<std::size_t>(id)];
  return std::string_view(text_).substr(place.begin, place.length);
}

std::array<std::int32_t, 256> fallback_tokens(const Vocabulary& vocabulary) {
  static constexpr char digits[] = "0123456789ABCDEF";
  std::array<std::int32_t, 256> ids{};
  for (std::size_t byte = 0; byte < ids.size(); ++byte)
    ids[byte] =
        vocabulary.id(std::string{'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'}).value_or(-1);
  return ids;
}

}  // namespace sherd::data
