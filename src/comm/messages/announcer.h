#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/exchange/call.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// Backend::announce() by messages. Each rank tells the next one, round the group, so that it costs one
/// message a call whatever the group's size, and yet two ranks whose calls differ have neighbours between
/// them whose calls differ. Thread-safe; nobody waits.
class Announcer {
 public:
  explicit Announcer(std::shared_ptr<Port> port) : port_(std::move(port)) {}
  ~Announcer();
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;

  /// The call's number, from 1. What is wrong with it is for check() to say.
  std::uint64_t add(const Signature& call);
  /// What is wrong where the previous rank is known to have made another call, or empty.
  std::string check();
  /// The previous rank, where it is not known to have made that many calls.
  std::vector<int> absent(std::uint64_t number);

 private:
  struct Announced {
    Signature mine, theirs;
    int send = -1, receive = -1;  ///< handles of the port; -1: done
  };
  int previous() const { return (port_->rank() + port_->size() - 1) % port_->size(); }
  std::string look();

  std::shared_ptr<Port> port_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::deque<std::unique_ptr<Announced>> open_;  ///< the oldest first; where they lie, messages are under way
  std::uint64_t count_ = 0, heard_ = 0;
};

}  // namespace sherd::comm
