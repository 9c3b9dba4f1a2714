#include "sharding/units/residency_plan.h"

#include <algorithm>
#include <set>
#include <utility>

namespace sherd::sharding {
namespace {

/// Plays the trace forward and decides at each event; of what is to come it knows the places in the trace, so
/// that lists of many micro-batches take no longer for each.
class Planner {
 public:
  Planner(std::span<const UseEvent> trace, std::span<const std::int64_t> sizes, const ResidencyLimits& limits)
      : trace_(trace),
        sizes_(sizes),
        limits_(limits),
        uses_(sizes.size()),
        used_(sizes.size()),
        elements_before_(trace.size() + 1),
        resident_(sizes.size()),
        in_use_(sizes.size()),
        under_way_(sizes.size()) {
    for (std::size_t i = 0; i < trace.size(); ++i) {
      const auto& [unit, acquire] = trace[i];
      elements_before_[i + 1] = elements_before_[i] + (acquire ? size(unit) : 0);
      if (acquire) of(uses_, unit).push_back(i);
    }
    for (const auto& uses : uses_)
      if (!uses.empty() && size(trace[uses[0]].unit) > 0) to_gather_.insert(uses[0]);
  }

  /// Takes each event in turn.
  ResidencyStep at(std::size_t event) {
    ResidencyStep step;
    const int unit = trace_[event].unit;
    if (size(unit) == 0) return step;
    if (trace_[event].acquire) {
      if (!of(resident_, unit)) {
        make_room(event, unit, step);
        bring(event);
      }
      of(in_use_, unit) = true;
      if (of(under_way_, unit)) of(under_way_, unit) = false, under_way_sum_ -= size(unit);
      prefetch(step);
    } else {
      of(in_use_, unit) = false;
      step.release = !keep(event, unit);
      if (step.release) drop(event, unit);
    }
    return step;
  }

 private:
  template <class T>
  static typename std::vector<T>::reference of(std::vector<T>& by_unit, int unit) {
    return by_unit[static_cast<std::size_t>(unit)];
  }
  std::int64_t size(int unit) const { return sizes_[static_cast<std::size_t>(unit)]; }
  /// The unit that event `use` acquires is gathered for it.
  void bring(std::size_t use) {
    const int unit = trace_[use].unit;
    of(resident_, unit) = true, live_ += size(unit);
    to_gather_.erase(use);
  }
  void drop(std::size_t event, int unit) {
    of(resident_, unit) = false, live_ -= size(unit);
    if (const std::size_t next = next_use(event, unit); next < trace_.size()) to_gather_.insert(next);
  }

  /// The unit's next use behind `after`, which never lies before that of an earlier call.
  std::size_t next_use(std::size_t after, int unit) {
    const std::vector<std::size_t>& uses = of(uses_, unit);
    std::size_t& used = of(used_, unit);
    while (used < uses.size() && uses[used] <= after) ++used;
    return used < uses.size() ? uses[used] : trace_.size();
  }

  bool keep(std::size_t event, int unit) {
    const std::size_t next = next_use(event, unit);
    if (next == trace_.size() || live_ > limits_.max_live) return false;
    const std::int64_t distance = elements_before_[next] - elements_before_[event + 1];
    return limits_.max_reuse_distance > 0 && distance <= limits_.max_reuse_distance;
  }

  /// Drops kept units that nobody holds, farthest next use first, until `unit` fits under the cap.
  void make_room(std::size_t event, int unit, ResidencyStep& step) {
    while (live_ + size(unit) > limits_.max_live) {
      int victim = -1;
      std::size_t farthest = 0;
      for (int u = 0; u < static_cast<int>(sizes_.size()); ++u) {
        if (u == unit || !of(resident_, u) || of(in_use_, u) || of(under_way_, u)) continue;
        const std::size_t next = next_use(event, u);
        if (victim < 0 || next > farthest) victim = u, farthest = next;
      }
      if (victim < 0) return;
      step.evict.push_back(victim);
      drop(event, victim);
    }
  }

  void prefetch(ResidencyStep& step) {
    while (!to_gather_.empty()) {
      const std::size_t use = *to_gather_.begin();
      const int unit = trace_[use].unit;
      if (under_way_sum_ + size(unit) > limits_.prefetch_bucket || live_ + size(unit) > limits_.max_live)
        return;
      step.prefetch.push_back(unit);
      bring(use);
      of(under_way_, unit) = true;
      under_way_sum_ += size(unit);
    }
  }

  std::span<const UseEvent> trace_;
  std::span<const std::int64_t> sizes_;
  const ResidencyLimits& limits_;
  std::vector<std::vector<std::size_t>> uses_;  ///< by unit: the events that acquire it
  std::vector<std::size_t> used_;               ///< how many of them next_use() has passed
  std::vector<std::int64_t> elements_before_;   ///< that all events before this one acquire
  std::set<std::size_t> to_gather_;             ///< the next use of each unit that is not resident
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
