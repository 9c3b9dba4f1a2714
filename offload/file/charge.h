#pragma once

#include <cstdint>
#include <utility>

#include "device/ledger.h"

namespace sherd::offload {

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
