#include "sharding/units/residency_plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>

namespace sherd::sharding {
namespace {

/// Forward and backward over `units` blocks with a root (unit 0) that is held throughout each direction.
std::vector<UseEvent> model_trace(int units) {
  std::vector<UseEvent> trace{{0, true}};
  for (int u = 1; u < units; ++u) trace.push_back({u, true}), trace.push_back({u, false});
  trace.push_back({0, false});
  trace.push_back({0, true});
  for (int u = units - 1; u >= 1; --u) trace.push_back({u, true}), trace.push_back({u, false});
  trace.push_back({0, false});
  return trace;
}

/// Plays a plan and checks that it never drops what is in use and never holds a unit twice.
struct Played {
  std::int64_t gathers = 0, peak = 0;
  std::vector<int> order;  ///< the order of the gathers
};
Played play(const std::vector<UseEvent>& trace, const std::vector<ResidencyStep>& plan,
            const std::vector<std::int64_t>& sizes) {
  Played out;
  std::set<int> resident, held;
  std::int64_t live = 0;
  const auto size = [&](int unit) { return sizes[static_cast<std::size_t>(unit)]; };
  const auto bring = [&](int unit) {
    EXPECT_TRUE(resident.insert(unit).second) << "unit " << unit << " gathered twice";
    ++out.gathers;
    out.order.push_back(unit);
    live += size(unit);
    out.peak = std::max(out.peak, live);
  };
  const auto drop = [&](int unit) {
    EXPECT_FALSE(held.contains(unit)) << "unit " << unit << " dropped while leased";
    EXPECT_EQ(resident.erase(unit), 1u);
    live -= size(unit);
  };
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const int unit = trace[i].unit;
    if (trace[i].acquire) {
      for (const int victim : plan[i].evict) drop(victim);
      if (!resident.contains(unit)) bring(unit);
      held.insert(unit);
      for (const int next : plan[i].prefetch) bring(next);
    } else {
      held.erase(unit);
      if (plan[i].release) drop(unit);
    }
  }
  EXPECT_TRUE(resident.empty());
  return out;
}

TEST(PlanResidency, NothingAheadAndNothingKeptWithZeroLimits) {
  const auto trace = model_trace(4);
  const std::vector<std::int64_t> sizes(4, 10);
  const auto plan = plan_residency(trace, sizes, {0, 1000, 0});
  for (const ResidencyStep& step : plan) EXPECT_TRUE(step.prefetch.empty() && step.evict.empty());
  const Played played = play(trace, plan, sizes);
  EXPECT_EQ(played.gathers, 8);  // each unit once forward, once backward
  EXPECT_EQ(played.peak, 20);    // the root and one block
}

TEST(PlanResidency, PrefetchStaysWithinItsBucketAndTheLiveCap) {
  const auto trace = model_trace(6);
  const std::vector<std::int64_t> sizes(6, 10);
  const auto plan = plan_residency(trace, sizes, {20, 1000, 0});
  EXPECT_EQ(plan[0].prefetch, (std::vector<int>{1, 2}));
  EXPECT_EQ(play(trace, plan, sizes).gathers, 12);
  const auto capped = plan_residency(trace, sizes, {1000, 30, 0});
  EXPECT_LE(play(trace, capped, sizes).peak, 30);
}

TEST(PlanResidency, ReuseKeepsUnitsThatComeBackSoon) {
  const auto trace = model_trace(4);
  const std::vector<std::int64_t> sizes(4, 10);
  EXPECT_EQ(play(trace, plan_residency(trace, sizes, {0, 1000, 1000}), sizes).gathers, 4);
  // Distance 10 reaches over the root's own return, and so keeps the last block only; the root comes back at
  // once.
  EXPECT_EQ(play(trace, plan_residency(trace, sizes, {0, 1000, 10}), sizes).gathers, 6);
}

TEST(PlanResidency, EvictsKeptUnitsWhenTheCapWouldBePassed) {
  const auto trace = model_trace(6);
  const std::vector<std::int64_t> sizes(6, 10);
  const auto plan = plan_residency(trace, sizes, {0, 30, 1000});
  const Played played = play(trace, plan, sizes);
  EXPECT_LE(played.peak, 30);
  EXPECT_LT(played.gathers, 12);  // something was reused
}

TEST(PlanResidency, UnitsWithoutGatherTakeNoPart) {
  const auto trace = model_trace(3);
  const std::vector<std::int64_t> sizes{0, 10, 0};
  const auto plan = plan_residency(trace, sizes, {100, 100, 0});
  for (std::size_t i = 0; i < trace.size(); ++i)
    if (trace[i].unit != 1) {
      EXPECT_FALSE(plan[i].release);
    }
}

TEST(GatherOrder, IsTheOneInWhichThePlanGathers) {
  const auto trace = model_trace(6);
  const std::vector<std::int64_t> sizes{25, 10, 12, 10, 14, 10};
  for (const std::int64_t prefetch : {0, 12, 30})
    for (const std::int64_t reuse : {0, 30, 100})
      for (const std::int64_t cap : {30, 60, 1000}) {
        const auto plan = plan_residency(trace, sizes, {prefetch, cap, reuse});
        EXPECT_EQ(gather_order(trace, plan, sizes), play(trace, plan, sizes).order)
            << "prefetch " << prefetch << ", reuse " << reuse << ", cap " << cap;
      }
}

/// A thousand micro-batches of 48 blocks, which all stay: their plan is made between two steps.
TEST(PlanResidency, OfALongListIsMadeInNoTime) {
  std::vector<UseEvent> trace;
  for (int micro = 0; micro < 1024; ++micro) {
    const auto one = model_trace(49);
    trace.insert(trace.end(), one.begin(), one.end());
  }
  const std::vector<std::int64_t> sizes(49, 10);
  for (const std::int64_t reuse : {0, 1'000'000}) {
    const auto start = std::chrono::steady_clock::now();
    const auto plan = plan_residency(trace, sizes, {30, 1'000'000, reuse});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1))
        << "some 20 ms on idle cores";
    EXPECT_EQ(play(trace, plan, sizes).gathers, reuse ? 49 : 1024 * 98);
  }
}

TEST(PlanResidency, AUnitLargerThanTheCapIsStillGathered) {
  const auto trace = model_trace(3);
  const std::vector<std::int64_t> sizes{50, 50, 50};
  EXPECT_EQ(play(trace, plan_residency(trace, sizes, {0, 10, 0}), sizes).gathers, 6);
}

}  // namespace
}  // namespace sherd::sharding
