#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "data/packing/packing.h"

namespace sherd::data {

/// Which items of given lengths go together in rows of so many places. That is decided once, by best fit of
/// the longest first (bin packing: Johnson 1973; of documents: Ding et al. 2024, "Fewer Truncations Improve
/// Language Modeling"); every round puts other items of the same lengths into the places, and takes the rows
/// in another order, or not shuffled, in that of their first items.
///
/// Held in memory: 4 bytes per item, and per round in use as many more, and 12 per row.
class RowPacking {
 public:
  using OfItem = std::function<std::int64_t(std::uint32_t)>;
  /// `length`: places of an item, from 1 to `row`. `counted`: how many of these places() counts.
  RowPacking(std::size_t items, OfItem length, OfItem counted, std::int64_t row, std::uint64_t seed,
             bool shuffle);

  std::int64_t rows() const { return std::ssize(starts_) - 1; }
  /// Places of a round that are counted.
  std::int64_t places() const { return places_; }
  /// Counted places of the rows before a position.
  std::int64_t places_before(std::int64_t position) const;
  /// Calls visit(item) for the items of the row at `position`, in order.
  template <class Visit>
  void for_each_item(std::int64_t position, Visit&& visit) const {
    require_position(position);
    const auto at = round(position / rows());
    const std::uint32_t row = at->rows[static_cast<std::size_t>(position % rows())];
    for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i) visit(at->items[ranks_[i]]);
  }

 private:
  struct Round {
    std::vector<std::uint32_t> items;  // the item of each rank of length
    std::vector<std::uint32_t> rows;   // the row of the packing at each place of the round
    std::vector<std::int64_t> places;  // of the rows before each place
  };
  static void require_position(std::int64_t position);
  void pack(std::size_t items);
  std::shared_ptr<const Round> round(std::int64_t index) const;
  std::shared_ptr<const Round> make_round(std::int64_t index) const;
  void order(Round& out, std::int64_t index) const;

  OfItem length_, counted_;
  std::int64_t row_;
  std::uint64_t seed_;
  bool shuffle_;
  std::int64_t places_ = 0;
  std::vector<std::uint32_t> ranks_;   // row by row, ranks of length: 0 is the longest
  std::vector<std::uint32_t> starts_;  // where each row begins in ranks_, and their end
  RecentRounds<Round> rounds_;
};

}  // namespace sherd::data
