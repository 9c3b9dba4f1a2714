#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange/backend.h"

namespace sherd::comm {

/// The groups that one rank has split from one world. A rank that leaves one because another failed tells its
/// ranks why: they may be in no group with the rank that began it. Thread-safe.
class Siblings {
 public:
  void add(Backend& group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(&group);
    cause_.reset();
  }
  void remove(const Backend& group) {
    std::lock_guard lock(mutex_);
    groups_.erase(std::find(groups_.begin(), groups_.end(), &group));
    if (groups_.empty()) cause_.reset();
  }
  /// The recorder of all groups' calls.
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }

  /// While it lives, the calling thread waits for a transfer with that rank of the world; -1: it does not.
  class Wait {
   public:
    Wait(Siblings& groups, int world_rank) : groups_(world_rank < 0 ? nullptr : &groups) { tell(world_rank); }
    ~Wait() { tell(-1); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    void tell(int world_rank) {
      if (!groups_) return;
      std::lock_guard lock(groups_->mutex_);
      for (Backend* group : groups_->groups_) group->tell_wait(world_rank);
    }
    Siblings* groups_;
  };

  /// The failure of one of the groups when the rank, which leaves them one after the other because of an
  /// error, left the first; empty where all were well, so that the error is its own.
  std::string cause() {
    std::lock_guard lock(mutex_);
    if (cause_) return *cause_;
    cause_.emplace();
    for (const Backend* group : groups_)
      if (cause_->empty()) cause_ = group->failure();
    return *cause_;
  }

 private:
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  std::mutex mutex_;
  std::vector<Backend*> groups_;      // guarded by mutex_
  std::optional<std::string> cause_;  // guarded by mutex_
};

}  // namespace sherd::comm
