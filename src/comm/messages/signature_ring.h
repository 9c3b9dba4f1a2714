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

/// How ranks compare their calls by messages: each tells the next one, round the ring, so that it costs one
/// message a call whatever the number of ranks, and yet two ranks whose calls differ have neighbours between
/// them whose calls differ. A rank that waits for the previous one's word at every call is never further
/// ahead of any other than there are ranks. Thread-safe; nobody waits here.
class SignatureRing {
 public:
  /// This rank's neighbours in the ring; both itself for a ring of one.
  SignatureRing(std::shared_ptr<Port> port, int previous, int next, int tag)
      : port_(std::move(port)), previous_(previous), next_(next), tag_(tag) {}
  ~SignatureRing();
  SignatureRing(const SignatureRing&) = delete;
  SignatureRing& operator=(const SignatureRing&) = delete;

  /// The call's number, from 1. What is wrong with it is for check() to say.
  std::uint64_t add(const CallSignature& call);
  /// The error message where the previous rank is known to have made another call, or empty.
  std::string check();
  /// The previous rank, where it is not known to have made that many calls.
  std::vector<int> absent(std::uint64_t number);

 private:
  struct ToldCalls {
    CallSignature mine, theirs;
    int send = -1, receive = -1;  ///< handles of the port; -1: done
  };

  std::shared_ptr<Port> port_;
  int previous_, next_, tag_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::deque<std::unique_ptr<ToldCalls>> open_;  ///< the oldest first; where they lie, messages are under way
  std::uint64_t count_ = 0, heard_ = 0;
};

}  // namespace sherd::comm
