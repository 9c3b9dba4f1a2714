#include "comm/exchange/descriptor.h"

#include <cstring>

namespace sherd::comm {

std::uint64_t Announcements::add(const CallSignature& call) {
  std::array<std::uint64_t, words> plain{};
  std::memcpy(plain.data(), &call, sizeof call);
  const std::uint64_t number = count_.load(std::memory_order_relaxed) + 1;
  Announcement& entry = entries_[number % kept];
  entry.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < words; ++i) entry.call[i].store(plain[i], std::memory_order_relaxed);
  // In one order with what its peers look at after their own: of two ranks, one at least sees the other's.
  entry.number.store(number, std::memory_order_seq_cst);
  count_.store(number, std::memory_order_seq_cst);
  return number;
}

bool Announcements::read(std::uint64_t number, CallSignature& call) const {
  const Announcement& entry = entries_[number % kept];
  if (entry.number.load(std::memory_order_seq_cst) != number) return false;
  std::array<std::uint64_t, words> plain{};
  for (std::size_t i = 0; i < words; ++i) plain[i] = entry.call[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.number.load(std::memory_order_relaxed) != number) return false;
  std::memcpy(static_cast<void*>(&call), plain.data(), sizeof call);
  return true;
}

}  // namespace sherd::comm
