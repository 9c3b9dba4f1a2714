#include "comm/gather.h"

#include <gtest/gtest.h>

namespace sherd::comm {
namespace {

struct Record {
  std::int32_t rank;
  double value;
};

TEST(GatherRecords, gives_all_ranks_everyones_in_rank_order) {
  for (const int ranks : {1, 3})
    run_local(ranks, CommOptions{}, [&](Communicator& world) {
      const std::vector<Record> one = gather_records(world, Record{world.rank(), 0.5 * world.rank()}, "one");
      ASSERT_EQ(one.size(), static_cast<std::size_t>(ranks));
      const std::vector<std::int64_t> mine{world.rank(), 7};
      const std::vector<std::int64_t> two = gather_records(world, std::span<const std::int64_t>(mine), "two");
      ASSERT_EQ(two.size(), 2 * one.size());
      for (int r = 0; r < ranks; ++r) {
        const auto at = static_cast<std::size_t>(r);
        EXPECT_EQ(one[at].rank, r);
        EXPECT_EQ(one[at].value, 0.5 * r);
        EXPECT_EQ(two[2 * at], r);
        EXPECT_EQ(two[2 * at + 1], 7);
      }
      EXPECT_TRUE(gather_records(world, std::span<const Record>(), "none").empty());
      EXPECT_EQ(world.traffic().all_gather, 0u) << "they count as scalars";
    });
}

}  // namespace
}  // namespace sherd::comm
