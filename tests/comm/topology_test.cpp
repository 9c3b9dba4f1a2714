#include "comm/exchange/topology.h"

#include <gtest/gtest.h>

#include "comm/exchange/sum_across.h"

namespace sherd::comm {
namespace {

using MachineOfRanks = std::vector<std::uint64_t>;

TEST(Topology, NumbersMachinesByTheirFirstRanks) {
  const Topology t(3, MachineOfRanks{9, 9, 4, 4, 9});
  EXPECT_EQ(t.size(), 5);
  EXPECT_EQ(t.machines(), 2);
  EXPECT_EQ(t.machine(), 1);
  EXPECT_EQ(t.ranks_on(0), (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(t.locals(), (std::vector<int>{2, 3}));
  EXPECT_EQ(t.local_index(4), 2);
  EXPECT_FALSE(t.is_leader());
  EXPECT_EQ(t.previous_leader(), 0);
  EXPECT_EQ(t.next_leader(), 0);
}

TEST(Topology, CutsRankOrderWhereTheMachineChanges) {
  const Topology t(0, MachineOfRanks{9, 9, 4, 4, 9});
  const auto& segments = t.segments();
  ASSERT_EQ(segments.size(), 3u);
  const int expected[3][3] = {{0, 0, 2}, {1, 2, 4}, {0, 4, 5}};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(segments[i].machine, expected[i][0]);
    EXPECT_EQ(segments[i].begin, expected[i][1]);
    EXPECT_EQ(segments[i].end, expected[i][2]);
  }
}

TEST(Topology, DeputiesShareTheWork) {
  const Topology t(0, MachineOfRanks{1, 1, 1, 2, 2});
  EXPECT_EQ(t.deputy(0, 1), 1) << "itself at home";
  EXPECT_EQ(t.deputy(1, 0), 3);
  EXPECT_EQ(t.deputy(1, 1), 4);
  EXPECT_EQ(t.deputy(1, 2), 3);
  EXPECT_EQ(t.deputy(0, 4), 1);
}

TEST(Topology, SumsGoTheWayOfFewerBytes) {
  const Topology pairs(0, MachineOfRanks{1, 1, 2, 2});
  const ReduceSpec fp32;
  ReduceSpec bf16;
  bf16.in = bf16.rounding = DType::bf16;
  // By parts two ranks' of the other machine come; in a chain partial sums go over, and back to owners of the
  // first machine.
  EXPECT_EQ(crossing_bytes(pairs, fp32, 0, false), 8u);
  EXPECT_EQ(crossing_bytes(pairs, fp32, 0, true), 8u);
  EXPECT_EQ(crossing_bytes(pairs, fp32, 3, true), 4u);
  EXPECT_EQ(plan_chains(pairs, fp32), (std::vector<bool>{false, false, true, true}));
  EXPECT_EQ(plan_chains(pairs, bf16), (std::vector<bool>(4, false)));
  // With a sum to go on from, which must come from its owner first.
  ReduceSpec onto = fp32;
  const std::byte begun{};
  onto.onto = &begun;
  EXPECT_EQ(crossing_bytes(pairs, onto, 3, true), 8u);
  EXPECT_EQ(plan_chains(pairs, onto), (std::vector<bool>(4, false)));
  // Eight ranks a machine: 16 bytes per element against 4 or 8.
  MachineOfRanks eights;
  for (std::uint64_t r = 0; r < 16; ++r) eights.push_back(r / 8);
  EXPECT_EQ(plan_chains(Topology(0, eights), bf16), std::vector<bool>(16, true));
  EXPECT_EQ(plan_chains(Topology::apart(0, 16), bf16), std::vector<bool>(16, false));
}

}  // namespace
}  // namespace sherd::comm
