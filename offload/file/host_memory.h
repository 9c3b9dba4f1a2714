#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "device/ledger.h"

namespace sherd::offload {

/// Zeroed memory straight from the system, on page boundaries, on huge pages where it can. Not on any ledger.
class HostMemory {
 public:
  /// Throws Error{memory} when the system has no more.
  explicit HostMemory(std::size_t bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0, mapped_ = 0;
  void* mapping_ = nullptr;
};

/// Bytes on a ledger, which outlives this, until the object goes.
class Charge {
 public:
  /// Throws Error{memory} at the ledger's limit.
  Charge(device::Ledger& ledger, device::Tier tier, device::Category category, std::uint64_t bytes)
      : ledger_(&ledger), tier_(tier), category_(category), bytes_(bytes) {
    ledger.charge(tier, category, bytes);
  }
  ~Charge() {
    if (ledger_) ledger_->credit(tier_, category_, bytes_);
  }
  Charge(Charge&& other) noexcept
      : ledger_(std::exchange(other.ledger_, nullptr)),
        tier_(other.tier_),
        category_(other.category_),
        bytes_(other.bytes_) {}
  Charge& operator=(Charge&&) = delete;
  /// Leaves the bytes charged for good.
  void keep() { ledger_ = nullptr; }

 private:
  device::Ledger* ledger_;
  device::Tier tier_;
  device::Category category_;
  std::uint64_t bytes_;
};

}  // namespace sherd::offload
