#include "sharding/schedule/schedules.h"

#include <gmock/gmock.h>

#include <numeric>
#include <random>
#include <tuple>

#include "base/error.h"

namespace sherd::sharding {
namespace {

using Weights = std::vector<std::int64_t>;

std::vector<std::int64_t> sums(const Weights& weights, const std::vector<Chunk>& chunks) {
  std::vector<std::int64_t> out;
  for (const Chunk& chunk : chunks)
    out.push_back(std::accumulate(weights.begin() + static_cast<std::ptrdiff_t>(chunk.begin),
                                  weights.begin() + static_cast<std::ptrdiff_t>(chunk.end), std::int64_t{0}));
  return out;
}

/// The values to be least, in order: the largest sum, the squares; then the first chunk's end, and so on.
using Rank = std::tuple<std::int64_t, std::int64_t, std::vector<std::size_t>>;
Rank rank_of(const Weights& weights, const std::vector<Chunk>& chunks) {
  Rank rank;
  for (const std::int64_t sum : sums(weights, chunks)) {
    std::get<0>(rank) = std::max(std::get<0>(rank), sum);
    std::get<1>(rank) += sum * sum;
  }
  for (const Chunk& chunk : chunks) std::get<2>(rank).push_back(chunk.end);
  return rank;
}

/// The best of all cuts, one of which is tried after the other.
Rank best_of_all(const Weights& weights, std::size_t chunks, std::vector<Chunk> begun = {}) {
  const std::size_t begin = begun.empty() ? 0 : begun.back().end, left = chunks - begun.size();
  if (left == 1) {
    begun.push_back({begin, weights.size()});
    return rank_of(weights, begun);
  }
  std::optional<Rank> best;
  for (std::size_t end = begin + 1; end + left - 1 <= weights.size(); ++end) {
    std::vector<Chunk> more = begun;
    more.push_back({begin, end});
    const Rank rank = best_of_all(weights, chunks, more);
    if (!best || rank < *best) best = rank;
  }
  return *best;
}

TEST(Cut, IsTheBestOfAllCuts) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const std::size_t parts = 1 + random() % 9, chunks = 1 + random() % parts;
    Weights weights;
    const unsigned most = 1 + random() % 20;
    for (std::size_t i = 0; i < parts; ++i) weights.push_back(random() % (most + 1));
    const std::vector<Chunk> got = cut(weights, chunks);
    ASSERT_EQ(got.size(), chunks);
    for (std::size_t i = 0; i < chunks; ++i) {
      EXPECT_EQ(got[i].begin, i == 0 ? 0 : got[i - 1].end);
      EXPECT_LT(got[i].begin, got[i].end);
    }
    EXPECT_EQ(got.back().end, parts);
    EXPECT_EQ(rank_of(weights, got), best_of_all(weights, chunks)) << ::testing::PrintToString(weights);
  }
}

TEST(Cut, EqualPartsGoEvenlyAndTheFirstChunksGetLess) {
  EXPECT_EQ(sums(Weights(13, 1), cut(Weights(13, 1), 4)), Weights({3, 3, 3, 4}));
  EXPECT_EQ(sums(Weights(12, 1), cut(Weights(12, 1), 4)), Weights(4, 3));
  EXPECT_EQ(sums(Weights(5, 0), cut(Weights(5, 0), 3)), Weights(3, 0));
}

TEST(Cut, HeavyEndsTakePartsFromTheirChunks) {
  // A model of 12 blocks with a head that weighs as much as five of them.
  Weights weights(13, 7);
  weights.push_back(38);
  EXPECT_EQ(cut(weights, 2), (std::vector<Chunk>{{0, 9}, {9, 14}}));
  // Weights as large as any model's are summed exactly.
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_EQ(cut({huge, huge, 1, huge, huge}, 2), (std::vector<Chunk>{{0, 2}, {2, 5}}));
}

TEST(Cut, ManyPartsTakeNoTime) {
  const std::vector<Chunk> got = cut(Weights(5000, 3), 64);
  for (const Chunk& chunk : got) EXPECT_THAT(chunk.end - chunk.begin, ::testing::AnyOf(78U, 79U));
}

TEST(Cut, FewerPartsThanChunksAreRefused) {
  EXPECT_THROW(cut({1, 2}, 3), Error);
  EXPECT_THROW(cut({1, 2}, 0), Error);
  EXPECT_THROW(cut({1, -2}, 1), Error);
}

}  // namespace
}  // namespace sherd::sharding
