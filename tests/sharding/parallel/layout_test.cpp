#include "sharding/parallel/layout.h"
#include "comm/dry/dry_world.h"

#include <gtest/gtest.h>

#include <vector>

namespace sherd::parallel {
namespace {

/// Positions of the stream's rows over all ranks of a grid of tensor × context ranks, which must be those of
/// the whole sequence, each once.
std::vector<std::int64_t> positions_of_all(int tensor, int context, ContextMethod method, bool sequence) {
  std::vector<std::int64_t> seen;
  for (int c = 0; c < context; ++c)
    for (int t = 0; t < tensor; ++t) {
      const auto tensor_ranks = comm::make_dry_world(t, tensor),
                 context_ranks = comm::make_dry_world(c, context);
      const Layout layout{tensor_ranks.get(), context_ranks.get(), sequence, method};
      const std::int64_t total = 3 * layout.sequence_multiple();
      const std::int64_t rows = total / context / (layout.cuts_stream() ? tensor : 1);
      if (!layout.cuts_stream() && t > 0) continue;  // the same as rank 0's
      const tensor::Positions at = layout.stream_positions(rows);
      const tensor::Slice slice = layout.stream_slice({1, rows, 1});
      EXPECT_EQ(slice.logical(), (tensor::Shape{1, total, 1}));
      for (std::int64_t row = 0; row < rows; ++row) {
        seen.push_back(at.at(row));
        EXPECT_EQ(slice.run_at(row, row + 1).logical, at.at(row));
      }
    }
  std::sort(seen.begin(), seen.end());
  return seen;
}

TEST(Layout, RanksShareTheTokensOfASequence) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses})
    for (const int tensor : {1, 2, 3, 4})
      for (const int context : {1, 2, 4})
        for (const bool sequence : {false, true}) {
          const auto seen = positions_of_all(tensor, context, method, sequence);
          for (std::size_t i = 0; i < seen.size(); ++i)
            ASSERT_EQ(seen[i], static_cast<std::int64_t>(i))
                << tensor << " x " << context << (sequence ? " with" : " without") << " sequence parallelism";
        }
}

TEST(Layout, OneRankHasAll) {
  const Layout layout;
  EXPECT_EQ(layout.sequence_multiple(), 1);
  EXPECT_EQ(layout.stream_positions(7), tensor::Positions{});
  EXPECT_TRUE(layout.stream_slice({2, 7, 3}).is_whole());
}

TEST(Layout, TheRingPairsChunksFromBothEnds) {
  const auto ranks = comm::make_dry_world(1, 4);
  const Layout layout{.context = ranks.get()};
  EXPECT_EQ(layout.inner_positions(6), (tensor::Positions{.first = 3, .count = 3, .second = 18}));
  EXPECT_THROW((void)layout.inner_positions(5), Error);
}

}  // namespace
}  // namespace sherd::parallel
