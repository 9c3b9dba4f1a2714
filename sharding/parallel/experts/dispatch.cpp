#include "sharding/parallel/experts/dispatch.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace sherd::parallel {
namespace {

/// The choices of each expert, in the order of tokens and choices.
std::vector<std::vector<std::size_t>> by_expert(std::span<const std::int32_t> chosen, std::int64_t experts) {
  std::vector<std::vector<std::size_t>> out(static_cast<std::size_t>(experts));
  for (std::size_t c = 0; c < chosen.size(); ++c)
    if (chosen[c] >= 0) out[static_cast<std::size_t>(chosen[c])].push_back(c);
  return out;
}

}  // namespace

std::vector<bool> dropped_choices(std::span<const std::int32_t> chosen, std::int64_t experts, int top_k,
                                  std::int64_t capacity, Drop drop, std::span<const double> weights) {
  if (capacity < 0) return {};
  const auto k = static_cast<std::size_t>(top_k);
  std::vector<bool> out(chosen.size());
  for (std::vector<std::size_t>& mine : by_expert(chosen, experts)) {
    if (std::ssize(mine) <= capacity) continue;
    if (drop == Drop::by_weight)
      std::stable_sort(mine.begin(), mine.end(), [&](auto a, auto b) { return weights[a] > weights[b]; });
    else
      std::stable_sort(mine.begin(), mine.end(), [&](auto a, auto b) { return a % k < b % k; });
    for (auto c = mine.begin() + capacity; c != mine.end(); ++c) out[*c] = true;
  }
  return out;
}

Dispatch plan_dispatch(std::span<const std::int32_t> chosen, std::int64_t experts, int top_k,
                       const std::vector<bool>& dropped) {
  const auto k = static_cast<std::size_t>(top_k);
  const auto taken = [&](std::size_t c) { return chosen[c] >= 0 && (dropped.empty() || !dropped[c]); };
  Dispatch out;
  out.counts.resize(static_cast<std::size_t>(experts));
  for (std::size_t c = 0; c < chosen.size(); ++c)
    if (taken(c)) ++out.counts[static_cast<std::size_t>(chosen[c])];
  std::vector<std::int64_t> next(out.counts.size());  // the row that comes next, by expert
  std::exclusive_scan(out.counts.begin(), out.counts.end(), next.begin(), std::int64_t{0});
  out.sources.resize(static_cast<std::size_t>(out.rows()));
  out.places.assign(chosen.size(), -1);
  for (std::size_t c = 0; c < chosen.size(); ++c) {
    if (!taken(c)) continue;
    const std::int64_t row = next[static_cast<std::size_t>(chosen[c])]++;
    out.places[c] = static_cast<std::int32_t>(row);
    out.sources[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(c / k);
  }
  return out;
}

Dispatch dry_dispatch(std::vector<std::int64_t> counts, std::int64_t most) {
  Dispatch out{.counts = std::move(counts)};
  if (most >= 0)
    for (std::int64_t& n : out.counts) n = std::min(n, most);
  return out;
}

Arrivals plan_arrivals(const std::vector<std::vector<std::int64_t>>& counts) {
  require(!counts.empty(), "rows arrive from no ranks");
  const std::size_t experts = counts[0].size();
  std::vector<std::vector<std::int64_t>> begins;  // where each rank's rows of each expert lie
  std::int64_t at = 0;
  for (const std::vector<std::int64_t>& of_rank : counts) {
    std::vector<std::int64_t>& begin = begins.emplace_back();
    for (const std::int64_t n : of_rank) begin.push_back(at), at += n;
  }
  Arrivals out;
  out.inverse.resize(static_cast<std::size_t>(at));
  for (std::size_t e = 0; e < experts; ++e)
    for (std::size_t rank = 0; rank < counts.size(); ++rank)
      for (std::int64_t i = 0; i < counts[rank][e]; ++i) {
        const std::int64_t row = begins[rank][e] + i;
        out.inverse[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(out.order.size());
        out.order.push_back(static_cast<std::int32_t>(row));
      }
  return out;
}

}  // namespace sherd::parallel
