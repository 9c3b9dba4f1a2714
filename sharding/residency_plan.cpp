#include "sharding/residency_plan.h"

#include <algorithm>
#include <utility>

namespace sherd::sharding {
namespace {

/// Plays the trace forward and decides at each event.
class Planner {
 public:
  Planner(std::span<const UseEvent> trace, std::span<const std::int64_t> sizes, const ResidencyLimits& limits)
      : trace_(trace),
        sizes_(sizes),
        limits_(limits),
        resident_(sizes.size()),
        in_use_(sizes.size()),
        under_way_(sizes.size()) {}

  ResidencyStep at(std::size_t event) {
    ResidencyStep step;
    const int unit = trace_[event].unit;
    if (size(unit) == 0) return step;
    if (trace_[event].acquire) {
      if (!resident(unit)) {
        make_room(event, unit, step);
        bring(unit);
      }
      flag(in_use_, unit) = true;
      if (flag(under_way_, unit)) flag(under_way_, unit) = false, under_way_sum_ -= size(unit);
      prefetch(event, step);
    } else {
      flag(in_use_, unit) = false;
      step.release = !keep(event, unit);
      if (step.release) drop(unit);
    }
    return step;
  }

 private:
  std::int64_t size(int unit) const { return sizes_[static_cast<std::size_t>(unit)]; }
  static std::vector<char>::reference flag(std::vector<char>& flags, int unit) {
    return flags[static_cast<std::size_t>(unit)];
  }
  bool resident(int unit) { return flag(resident_, unit); }
  void bring(int unit) { flag(resident_, unit) = true, live_ += size(unit); }
  void drop(int unit) { flag(resident_, unit) = false, live_ -= size(unit); }

  std::size_t next_use(std::size_t after, int unit) const {
    for (std::size_t i = after + 1; i < trace_.size(); ++i)
      if (trace_[i].acquire && trace_[i].unit == unit) return i;
    return trace_.size();
  }

  bool keep(std::size_t event, int unit) const {
    const std::size_t next = next_use(event, unit);
    if (next == trace_.size() || live_ > limits_.max_live) return false;
    std::int64_t distance = 0;
    for (std::size_t i = event + 1; i < next; ++i)
      if (trace_[i].acquire) distance += size(trace_[i].unit);
    return limits_.max_reuse_distance > 0 && distance <= limits_.max_reuse_distance;
  }

  /// Drops kept units that nobody holds, farthest next use first, until `unit` fits under the cap.
  void make_room(std::size_t event, int unit, ResidencyStep& step) {
    while (live_ + size(unit) > limits_.max_live) {
      int victim = -1;
      std::size_t farthest = 0;
      for (int u = 0; u < static_cast<int>(sizes_.size()); ++u) {
        if (u == unit || !resident(u) || flag(in_use_, u) || flag(under_way_, u)) continue;
        const std::size_t next = next_use(event, u);
        if (victim < 0 || next > farthest) victim = u, farthest = next;
      }
      if (victim < 0) return;
      step.evict.push_back(victim);
      drop(victim);
    }
  }

  void prefetch(std::size_t event, ResidencyStep& step) {
    for (std::size_t i = event + 1; i < trace_.size(); ++i) {
      const int unit = trace_[i].unit;
      if (!trace_[i].acquire || size(unit) == 0 || resident(unit)) continue;
      if (under_way_sum_ + size(unit) > limits_.prefetch_bucket || live_ + size(unit) > limits_.max_live)
        return;
      step.prefetch.push_back(unit);
      bring(unit);
      flag(under_way_, unit) = true;
      under_way_sum_ += size(unit);
    }
  }

  std::span<const UseEvent> trace_;
  std::span<const std::int64_t> sizes_;
  const ResidencyLimits& limits_;
  std::vector<char> resident_, in_use_, under_way_;
  std::int64_t live_ = 0, under_way_sum_ = 0;
};

}  // namespace

std::vector<ResidencyStep> plan_residency(std::span<const UseEvent> trace,
                                          std::span<const std::int64_t> sizes,
                                          const ResidencyLimits& limits) {
  Planner planner(trace, sizes, limits);
  std::vector<ResidencyStep> steps;
  steps.reserve(trace.size());
  for (std::size_t i = 0; i < trace.size(); ++i) steps.push_back(planner.at(i));
  return steps;
}

std::vector<int> gather_order(std::span<const UseEvent> trace, std::span<const ResidencyStep> plan,
                              std::span<const std::int64_t> sizes) {
  std::vector<char> there(sizes.size());
  std::vector<int> order;
  const auto at = [&](int unit) -> char& { return there[static_cast<std::size_t>(unit)]; };
  const auto gather = [&](int unit) {
    if (!std::exchange(at(unit), 1)) order.push_back(unit);
  };
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const int unit = trace[i].unit;
    if (sizes[static_cast<std::size_t>(unit)] == 0) continue;
    if (!trace[i].acquire) {
      if (plan[i].release) at(unit) = 0;
      continue;
    }
    for (const int victim : plan[i].evict) at(victim) = 0;
    gather(unit);
    for (const int next : plan[i].prefetch) gather(next);
  }
  return order;
}

}  // namespace sherd::sharding
