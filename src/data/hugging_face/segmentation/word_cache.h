#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::data {

/// U+2581, which stands for a space in the pieces of SentencePiece, and begins words.
inline constexpr std::string_view space_mark = "\xe2\x96\x81";

/// Ids of words met before, of one thread. It forgets all when it is full, and changes no result.
class WordCache {
 public:
  /// Appends the ids of `word`; false: it is not known.
  bool find(std::string_view word, std::vector<std::int32_t>& ids) const;
  void insert(std::string_view word, std::span<const std::int32_t> ids);

 private:
  struct CachedWord {
    std::uint64_t hash = 0;  // 0: none
    std::uint32_t text = 0, ids = 0;
    std::uint16_t length = 0, count = 0;
  };
  std::size_t slot_of(std::uint64_t hash, std::string_view word) const;

  std::vector<CachedWord> entries_;  // open addressing; made with the first word
  std::string text_;
  std::vector<std::int32_t> ids_;
  std::size_t used_ = 0;
};

/// Memory of threads that encode, a Space for each. It waits for the next call, so that its cache is used
/// again. Thread-safe.
template <class Space>
class SpacePool {
 public:
  std::unique_ptr<Space> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Space>();
    auto space = std::move(free_.back());
    free_.pop_back();
    return space;
  }
  void give_back(std::unique_ptr<Space> space) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(space));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Space>> free_;  // guarded by mutex_
};

}  // namespace sherd::data
