#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/exchange/call.h"

namespace sherd::comm {

/// Memory that ranks share is whole pages of the system.
inline constexpr std::size_t shared_page = 4096;

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

/// The calls that one rank has begun by a way on which ranks do not meet (Backend::announce()), numbered from
/// 1: the last few of them, in memory that the ranks share. Only the owner adds.
class Announcements {
 public:
  /// Calls in which a rank is further ahead of another than this are not compared.
  static constexpr std::uint64_t kept = 512;

  std::uint64_t count() const { return count_.load(std::memory_order_acquire); }
  /// Its number.
  std::uint64_t add(const CallSignature& call);
  /// False where that call has not come yet, or is not kept any more.
  bool read(std::uint64_t number, CallSignature& call) const;

 private:
  static constexpr std::size_t words = (sizeof(CallSignature) + 7) / 8;
  /// `number` is 0 while the words are written.
  struct Announcement {
    std::atomic<std::uint64_t> number{0};
    std::array<std::atomic<std::uint64_t>, words> call{};
  };
  std::atomic<std::uint64_t> count_{0};
  std::array<Announcement, kept> entries_;
};

}  // namespace sherd::comm
