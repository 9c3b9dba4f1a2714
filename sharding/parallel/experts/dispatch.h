#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "base/choices.h"

namespace sherd::parallel {

/// Choices of experts, [tokens, top_k], −1 of rows that choose none, and which of them are dropped where an
/// expert takes at most `capacity`; below 0: none is. Pure. `weights`, [tokens, top_k], are looked at where
/// those with the lowest go; of equal ones the later goes first.
std::vector<bool> dropped_choices(std::span<const std::int32_t> chosen, std::int64_t experts, int top_k,
                                  std::int64_t capacity, Drop drop, std::span<const double> weights);

/// Which rows experts compute: choices by expert, those of one in the order of tokens and choices.
struct Dispatch {
  std::vector<std::int64_t> counts;   ///< rows of each expert
  std::vector<std::int32_t> sources;  ///< the token of each row
  std::vector<std::int32_t> places;   ///< [tokens, top_k]: the row of each choice; -1: dropped, or none

  std::int64_t rows() const { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }
};
/// Pure. `dropped`: by choice; empty: none.
Dispatch plan_dispatch(std::span<const std::int32_t> chosen, std::int64_t experts, int top_k,
                       const std::vector<bool>& dropped = {});
/// The dispatch of a dry run, which knows how many rows each expert has, at most `most` (below 0: all), and
/// not which.
Dispatch dry_dispatch(std::vector<std::int64_t> counts, std::int64_t most);

/// Rows that arrive from several ranks, each rank's by expert, and the order that puts each expert's
/// together, those of one rank after those of the rank before.
struct Arrivals {
  std::vector<std::int32_t> order;    ///< which row that has arrived comes i-th
  std::vector<std::int32_t> inverse;  ///< which place row i takes
};
/// Pure. `counts`: [ranks][experts], rows that each rank sends to each of this rank's experts.
Arrivals plan_arrivals(const std::vector<std::vector<std::int64_t>>& counts);

}  // namespace sherd::parallel
