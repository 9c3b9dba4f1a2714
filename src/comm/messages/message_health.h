#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/exchange/board.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// The failure of a group that has no shared memory: told to the others by message. Thread-safe.
class MessageHealth final : public Health {
 public:
  MessageHealth(std::shared_ptr<Port> port, std::string name, std::shared_ptr<Health> parent);
  /// Also hears what the others have told meanwhile.
  bool failed() const noexcept override;
  std::string failure() const override;
  /// Records the first reason and tells the others.
  void fail(const std::string& reason) noexcept;
  /// Tells the others that this rank will make no more calls, and of the `failure` that it knows of, if any,
  /// before: they may hear this rank sooner than the one that failed.
  void depart(const std::string& failure = {}) noexcept;
  /// True when that rank has left or its process has ended; `why` says which.
  bool lost(int rank, std::string& why) const;
  /// True when its process has ended without leaving first.
  bool dead(int rank) const;

 private:
  void listen() const;

  std::shared_ptr<Port> port_;
  std::string name_;
  std::shared_ptr<Health> parent_;
  mutable std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  mutable std::string text_;            // guarded by mutex_
  mutable std::vector<bool> departed_;  // guarded by mutex_
};

}  // namespace sherd::comm
