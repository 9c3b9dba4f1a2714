#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sherd::sharding {

/// One moment of a micro-batch at which a unit's full parameters start or stop being needed.
struct UseEvent {
  int unit;
  bool acquire;  ///< else release: the last lease went
  bool operator==(const UseEvent&) const = default;
};

/// The actions of one event, in this order.
struct ResidencyStep {
  std::vector<int> evict;     ///< kept units to drop first, so that the live cap holds
  std::vector<int> prefetch;  ///< units whose gather starts now, after the event's own unit is there
  bool release = false;       ///< release events: drop the unit (else it is kept for its next use)
};

/// Element counts that bound residency; the names are DeepSpeed's.
struct ResidencyLimits {
  std::int64_t prefetch_bucket = 0;  ///< gathers under way ahead of use; 0 disables prefetch
  std::int64_t max_live = 0;         ///< gathered elements that prefetch and reuse respect
  /// Keep a unit whose next use is at most this many gathered elements away.
  std::int64_t max_reuse_distance = 0;
};

/// The gather schedule of one micro-batch as data: one step per event of `trace`. Pure.
///
/// `sizes` are the units' elements that a gather brings in; units of size 0 are always resident and take no
/// part. A unit is prefetched in order of next use while the sum under way stays within prefetch_bucket and
/// the live sum within max_live. It is kept at its last release when its next acquisition comes at most
/// max_reuse_distance gathered elements later and the live sum stays within max_live. Everything is dropped
/// at its last release of the trace.
std::vector<ResidencyStep> plan_residency(std::span<const UseEvent> trace,
                                          std::span<const std::int64_t> sizes, const ResidencyLimits& limits);

/// The units that follow from `plan`, in the order in which the executor starts to gather them.
std::vector<int> gather_order(std::span<const UseEvent> trace, std::span<const ResidencyStep> plan,
                              std::span<const std::int64_t> sizes);

}  // namespace sherd::sharding
