#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/exchange/call.h"

namespace sherd::comm {

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
