#pragma once

#include <cstdint>
#include <vector>

#include "comm/messages/messages.h"

namespace sherd::comm {

/// Point to point over messages, on tags of their own: the sender's signature goes ahead, and the payload
/// follows when the receiver has asked for it. So a receive that never comes costs its peer the signature's
/// few bytes, however large the tensor. As Backend's functions of these names.
class MessageTransfers {
 public:
  MessageTransfers(Messages& messages, Board& board)
      : port_(messages.port()),
        board_(board),
        sends_(static_cast<std::size_t>(port_.size())),
        receives_(sends_.size()) {}

  void start(Call& transfer);
  bool advance(Call& transfer);
  /// After an error.
  void cancel(Call& transfer) noexcept;

 private:
  void send_payload(Call& transfer);
  void take_payload(Call& transfer);

  Port& port_;
  Board& board_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer
};

}  // namespace sherd::comm
