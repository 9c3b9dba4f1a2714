#pragma once

#include "comm/exchange/descriptor.h"

namespace sherd::comm {

/// Which memory the ranks of a machine can read from each other; ranks as on the board.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Where peers find [data, data + bytes) of this rank; hidden when they cannot.
  virtual Address locate(const std::byte* data, std::size_t bytes) const = 0;
  /// The bytes that `rank` located, seen from here.
  virtual std::byte* resolve(int rank, const Address& address) const = 0;

  /// Around every collective and every copy of a transfer of this rank: between the two it may be reading
  /// peers.
  virtual void enter() {}
  virtual void leave() noexcept {}
  /// After a failed collective or transfer, before its tensors may go: returns when no peer can still be
  /// reading them. Nothing to do where resolved memory stays mapped whatever its owner does.
  virtual void outlast_readers() noexcept {}
};

}  // namespace sherd::comm
