#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/exchange/call.h"

namespace sherd::comm {

/// Where a peer finds bytes: a region (a shared window, or the descriptor's own payload) and an offset in it.
struct Address {
  static constexpr std::uint64_t hidden = ~std::uint64_t{0};             ///< peers cannot reach it: stage
  static constexpr std::uint64_t in_descriptor = ~std::uint64_t{0} - 1;  ///< in the descriptor's payload
  std::uint64_t region = hidden, offset = 0;
};

/// The publication of a rank for one round of a collective: its call, and where its offers lie
/// (exchange/machine.h).
struct CallDescriptor {
  static constexpr std::size_t max_addresses = 256, payload_bytes = 4096;
  CallSignature signature;
  std::array<Address, max_addresses> addresses;
  alignas(64) std::array<std::byte, payload_bytes> payload;
};

/// One transfer on its way from a rank to another.
struct MessageSlot {
  CallSignature signature;
  Address address;
};

/// The transfers of one ordered pair of ranks. The sender writes `posted` and `filled`, the receiver the
/// others.
struct PairChannel {
  static constexpr std::uint64_t capacity = 8;
  alignas(64) std::atomic<std::uint64_t> posted{0};  ///< slots written
  std::atomic<std::uint64_t> filled{0};              ///< bytes written to the ring, in all
  alignas(64) std::atomic<std::uint64_t> taken{0};   ///< slots whose data has arrived
  std::atomic<std::uint64_t> drained{0};             ///< bytes read from the ring, in all
  alignas(64) std::array<MessageSlot, capacity> slots;
};

}  // namespace sherd::comm
