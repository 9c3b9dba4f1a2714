#include "sharding/layout.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace sherd::sharding {
namespace {

ParameterPtr parameter(std::int64_t numel) {
  auto out = std::make_shared<autograd::Parameter>();
  out->shape = {numel};
  return out;
}

TEST(SegmentLayout, AlignsParametersAndPadsToEqualShards) {
  const SegmentLayout layout({parameter(100), parameter(1), parameter(64)}, 3);
  EXPECT_EQ(layout.offset(0), 0);
  EXPECT_EQ(layout.offset(1), 128);
  EXPECT_EQ(layout.offset(2), 192);
  EXPECT_EQ(layout.payload(), 165);
  EXPECT_EQ(layout.shard(), 128);
  EXPECT_EQ(layout.padded(), 384);
}

TEST(SegmentLayout, ShardsCoverEveryElementOnce) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const SegmentLayout layout({parameter(1000), parameter(3), parameter(777), parameter(64)}, ranks);
    std::vector<std::vector<int>> seen{std::vector<int>(1000), std::vector<int>(3), std::vector<int>(777),
                                       std::vector<int>(64)};
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t begin = rank * layout.shard();
      EXPECT_EQ(begin % layout_alignment, 0);
      for (const Piece& piece : layout.pieces(begin, begin + layout.shard())) {
        EXPECT_EQ(piece.flat_begin, layout.offset(piece.slot) + piece.parameter_begin);
        for (std::int64_t i = 0; i < piece.count; ++i)
          ++seen[piece.slot][static_cast<std::size_t>(piece.parameter_begin + i)];
      }
    }
    for (const auto& counts : seen)
      for (const int count : counts) ASSERT_EQ(count, 1);
  }
}

TEST(SegmentLayout, AnEmptyRangeHasNoPieces) {
  const SegmentLayout layout({parameter(10)}, 2);
  EXPECT_TRUE(layout.pieces(64, 128).empty());
  EXPECT_TRUE(layout.pieces(5, 5).empty());
}

TEST(SegmentLayout, NeedsARank) {
  EXPECT_THROW(SegmentLayout({parameter(1)}, 0), Error);
}

}  // namespace
}  // namespace sherd::sharding
