#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::data {

/// Ids of words met before, of one thread. It forgets all when it is full; what it holds changes no result.
class WordCache {
 public:
  /// Appends the ids of `word`; false: it is not known.
  bool find(std::string_view word, std::vector<std::int32_t>& ids) const;
  void insert(std::string_view word, std::span<const std::int32_t> ids);

 private:
  struct Entry {
    std::uint64_t hash = 0;  // 0: none
    std::uint32_t text = 0, ids = 0;
    std::uint16_t length = 0, count = 0;
  };
  std::size_t slot_of(std::uint64_t hash, std::string_view word) const;

  std::vector<Entry> entries_;  // open addressing; made with the first word
  std::string text_;
  std::vector<std::int32_t> ids_;
  std::size_t used_ = 0;
};

}  // namespace sherd::data
