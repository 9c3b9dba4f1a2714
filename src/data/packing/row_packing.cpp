#include "data/packing/row_packing.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "data/packing/legacy_random.h"

namespace sherd::data {
namespace {

/// Open rows by what is free in them, of which the fullest that still has enough is taken.
class OpenRows {
 public:
  explicit OpenRows(std::int64_t most)
      : rows_(static_cast<std::size_t>(most) + 1), some_(rows_.size() / 64 + 1) {}

  void put(std::int64_t free, std::uint32_t row) {
    const auto at = static_cast<std::size_t>(free);
    rows_[at].push_back(row);
    some_[at / 64] |= std::uint64_t{1} << at % 64;
  }
  /// The least free space of at least `needed`, which that row no longer has; -1: in no row.
  std::int64_t take(std::int64_t needed, std::uint32_t& row) {
    auto word = static_cast<std::size_t>(needed) / 64;
    std::uint64_t bits = some_[word] >> needed % 64 << needed % 64;
    while (bits == 0 && ++word < some_.size()) bits = some_[word];
    if (bits == 0) return -1;
    const std::size_t free = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
    row = rows_[free].back();
    rows_[free].pop_back();
    if (rows_[free].empty()) some_[word] &= ~(std::uint64_t{1} << free % 64);
    return static_cast<std::int64_t>(free);
  }

 private:
  std::vector<std::vector<std::uint32_t>> rows_;
  std::vector<std::uint64_t> some_;  // a bit for each that is not empty
};

}  // namespace

RowPacking::RowPacking(std::size_t items, OfItem length, OfItem counted, std::int64_t row, std::uint64_t seed,
                       bool shuffle)
    : length_(std::move(length)), counted_(std::move(counted)), row_(row), seed_(seed), shuffle_(shuffle) {
  require(items > 0 && items < std::numeric_limits<std::uint32_t>::max(), items, " texts to pack");
  pack(items);
}

/// Best fit, the longest first.
void RowPacking::pack(std::size_t items) {
  std::vector<std::int64_t> lengths(items);
  for (std::size_t i = 0; i < items; ++i) lengths[i] = length_(static_cast<std::uint32_t>(i));
  for (std::size_t i = 0; i < items; ++i) places_ += counted_(static_cast<std::uint32_t>(i));
  std::sort(lengths.begin(), lengths.end(), std::greater());
  OpenRows open(row_);
  std::vector<std::uint32_t> row_of(lengths.size());
  std::uint32_t rows = 0;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    std::uint32_t row = 0;
    std::int64_t free = open.take(lengths[rank], row);
    if (free < 0) row = rows++, free = row_;
    row_of[rank] = row;
    open.put(free - lengths[rank], row);
  }
  starts_.assign(rows + 1, 0);
  for (const std::uint32_t row : row_of) ++starts_[row + 1];
  std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  ranks_.resize(row_of.size());
  std::vector<std::uint32_t> next(starts_.begin(), starts_.end() - 1);
  for (std::size_t rank = 0; rank < row_of.size(); ++rank)
    ranks_[next[row_of[rank]]++] = static_cast<std::uint32_t>(rank);
}

void RowPacking::require_position(std::int64_t position) {
  require(position >= 0, "sample position ", position);
}

std::int64_t RowPacking::places_before(std::int64_t position) const {
  require_position(position);
  const std::int64_t index = position / rows(), place = position % rows();
  const std::int64_t whole = index * places_;  // every round has the same rows
  return place == 0 ? whole : whole + round(index)->places[static_cast<std::size_t>(place)];
}

std::shared_ptr<const RowPacking::Round> RowPacking::round(std::int64_t index) const {
  if (!shuffle_) index = 0;  // all rounds are the same
  return rounds_.get(index, [&] { return make_round(index); });
}

std::shared_ptr<const RowPacking::Round> RowPacking::make_round(std::int64_t index) const {
  auto out = std::make_shared<Round>();
  order(*out, index);
  std::int64_t places = 0;
  for (const std::uint32_t row : out->rows) {
    out->places.push_back(places);
    for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i) places += counted_(out->items[ranks_[i]]);
  }
  return out;
}

void RowPacking::order(Round& out, std::int64_t index) const {
  out.items.resize(ranks_.size());
  out.rows.resize(starts_.size() - 1);
  std::iota(out.items.begin(), out.items.end(), 0u);
  std::iota(out.rows.begin(), out.rows.end(), 0u);
  LegacyRandom random(static_cast<std::uint32_t>(seed_ + static_cast<std::uint64_t>(index)));
  if (shuffle_) random.shuffle(std::span(out.items));
  std::stable_sort(out.items.begin(), out.items.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return length_(a) > length_(b); });
  if (shuffle_) {
    random.shuffle(std::span(out.rows));
    return;
  }
  // By the first of their documents, so that a part of the rows is like the others.
  const auto first = [&](std::uint32_t row) {
    std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
    for (std::uint32_t i = starts_[row]; i < starts_[row + 1]; ++i)
      least = std::min(least, out.items[ranks_[i]]);
    return least;
  };
  std::vector<std::uint32_t> firsts(out.rows.size());
  std::transform(out.rows.begin(), out.rows.end(), firsts.begin(), first);
  std::sort(out.rows.begin(), out.rows.end(), [&](auto a, auto b) { return firsts[a] < firsts[b]; });
}

}  // namespace sherd::data
