#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::data {

/// Tokens and their ids, both ways. Ids may leave gaps.
class Vocabulary {
 public:
  /// A token that is there twice is a fault of the file, or its last id is the one that id() gives.
  enum class Repeats { fault, last_counts };
  /// Throws Error{data} for an id below 0, or one that two tokens share.
  explicit Vocabulary(const std::vector<std::pair<std::string, std::int32_t>>& tokens,
                      Repeats repeats = Repeats::fault);

  std::optional<std::int32_t> id(std::string_view token) const;
  /// Empty: no token has that id.
  std::string_view token(std::int32_t id) const;
  /// Above every id.
  std::int32_t end() const { return static_cast<std::int32_t>(places_.size()); }

 private:
  struct TokenRange {
    std::uint32_t begin = 0, length = 0;
  };
  std::size_t slot_of(std::string_view token) const;

  std::string text_;                 // all tokens behind each other
  std::vector<TokenRange> places_;   // by id
  std::vector<std::int32_t> slots_;  // open addressing: id, or -1
};

/// The id of each byte's token "<0xE2>", or -1.
std::array<std::int32_t, 256> fallback_tokens(const Vocabulary& vocabulary);

/// A hash for tables in memory.
std::uint64_t hash_bytes(std::string_view text);

}  // namespace sherd::data
