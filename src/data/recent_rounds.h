#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sherd::data {

/// The last two rounds of an endless order that were asked for: ranks that share it are at most a round
/// apart. Safe to share between threads.
template <class Round>
class RecentRounds {
 public:
  /// Round `index`, made by `make()` unless it is there.
  template <class Make>
  std::shared_ptr<const Round> get(std::int64_t index, Make&& make) const {
    std::lock_guard lock(mutex_);
    for (const auto& [known, round] : recent_)
      if (known == index) return round;
    std::shared_ptr<const Round> made = make();
    if (recent_.size() == 2) recent_.erase(recent_.begin());
    recent_.emplace_back(index, made);
    return made;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::int64_t, std::shared_ptr<const Round>>> recent_;  // newest last
};

}  // namespace sherd::data
