#include "comm/grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "tests/comm/conformance.h"

namespace sherd::comm {
namespace {

using conformance::error_of;
using ::testing::HasSubstr;
using Groups = std::vector<std::vector<int>>;

/// Places of one rank, written down by counting ranks off in nested loops.
using Place = std::map<Axis, int>;

struct Count {
  Axis axis;
  int size;
};
/// `order` from the fastest.
std::vector<Place> count_off(const std::vector<Count>& order) {
  std::vector<Place> places{{}};
  for (const auto& [axis, size] : order) {
    std::vector<Place> next;
    for (int k = 0; k < size; ++k)
      for (Place place : places) {
        place[axis] = k;
        next.push_back(place);
      }
    places = next;
  }
  return places;
}

/// Ranks that are equal in all but `free`, in the order of these.
Groups brute_force(const std::vector<Place>& places, const std::vector<Axis>& free) {
  std::map<Place, std::size_t> known;
  Groups groups;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    Place rest = places[rank];
    for (const Axis axis : free) rest.erase(axis);
    const auto [at, added] = known.emplace(rest, groups.size());
    if (added) groups.emplace_back();
    groups[at->second].push_back(static_cast<int>(rank));
  }
  return groups;
}

void expect_groups(const Grid& grid, Axis axis, const Groups& expected) {
  EXPECT_EQ(grid.partition(axis), expected) << name_of(axis);
  for (const auto& group : expected) {
    EXPECT_EQ(grid.size(axis), static_cast<int>(group.size()));
    for (std::size_t k = 0; k < group.size(); ++k) {
      EXPECT_EQ(grid.members(axis, group[k]), group) << name_of(axis);
      EXPECT_EQ(grid.coordinate(axis, group[k]), static_cast<int>(k)) << name_of(axis);
    }
  }
}

TEST(Grid, AgreesWithCountingRanksOff) {
  int grids = 0;
  for (const int ranks : {1, 2, 6, 8, 12, 16, 24, 64})
    for (const int tensor : {1, 2, 3})
      for (const int context : {1, 2})
        for (const int pipeline : {1, 2, 4})
          for (const int shard : {1, 2, 3, 4})
            for (const int expert : {1, 2, 4}) {
              const int sequence = ranks / (tensor * pipeline), data = sequence / context;
              if (data < 1 || ranks != tensor * context * pipeline * data || data % shard ||
                  sequence % expert || context * shard % expert)
                continue;
              const Grid grid(ranks, {tensor, context, pipeline, expert, context * shard});
              constexpr auto part = Axis::world;  // stands for the data ranks of a shard group
              const auto dense = count_off({{Axis::tensor, tensor},
                                            {Axis::context, context},
                                            {part, shard},
                                            {Axis::replica, data / shard},
                                            {Axis::pipeline, pipeline}});
              for (const Axis axis : {Axis::tensor, Axis::context, Axis::replica, Axis::pipeline})
                expect_groups(grid, axis, brute_force(dense, {axis}));
              expect_groups(grid, Axis::data, brute_force(dense, {part, Axis::replica}));
              expect_groups(grid, Axis::shard, brute_force(dense, {Axis::context, part}));
              expect_groups(grid, Axis::tensor_shard,
                            brute_force(dense, {Axis::tensor, Axis::context, part}));
              const auto experts = count_off({{Axis::tensor, tensor},
                                              {Axis::expert, expert},
                                              {Axis::expert_data, sequence / expert},
                                              {Axis::pipeline, pipeline}});
              for (const Axis axis : {Axis::expert, Axis::expert_data})
                expect_groups(grid, axis, brute_force(experts, {axis}));
              if (context == 1) {  // else a shard group's expert groups are no product of these
                const auto sharded = count_off({{Axis::tensor, tensor},
                                                {Axis::expert, expert},
                                                {part, shard / expert},
                                                {Axis::replica, data / shard},
                                                {Axis::pipeline, pipeline}});
                expect_groups(grid, Axis::expert_shard, brute_force(sharded, {part}));
                expect_groups(grid, Axis::expert_replica, brute_force(sharded, {Axis::replica}));
              }
              EXPECT_EQ(grid.partition(Axis::world).size(), 1u);
              EXPECT_EQ(grid.ranks(), ranks);
              ++grids;
            }
  EXPECT_GT(grids, 100);
}

/// Two machines of 8: the affinity example of Narayanan et al. 2021, and Megatron-LM's expert groups on the
/// same ranks.
TEST(Grid, HasMegatronsGroups) {
  const Grid grid(16, {.tensor = 2, .pipeline = 4});
  EXPECT_EQ(grid.partition(Axis::tensor),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(grid.partition(Axis::data),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(grid.partition(Axis::pipeline),
            (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  const Grid experts(16, {.tensor = 2, .pipeline = 2, .expert = 2});
  EXPECT_EQ(experts.partition(Axis::expert),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(experts.partition(Axis::expert_data),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
}

/// 16 ranks: tensor 2, 2 shards, 2 replicas, 2 stages of 8; and 3 stages of which two have a thing.
TEST(Grid, StagesThatShareAParameterHaveItsReplicas) {
  const Grid grid(16, {.tensor = 2, .pipeline = 2, .shard = 2});
  EXPECT_EQ(grid.replicas_on({0, 1}, 0), (std::vector<int>{0, 4, 8, 12}));
  EXPECT_EQ(grid.replicas_on({0, 1}, 15), (std::vector<int>{3, 7, 11, 15}));
  EXPECT_EQ(grid.partition_on({0, 1}),
            (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  const Grid three(6, {.pipeline = 3});
  EXPECT_EQ(three.replicas_on({0, 2}, 5), (std::vector<int>{1, 5}));
  EXPECT_EQ(three.partition_on({0, 2}), (Groups{{0, 4}, {1, 5}}));
  EXPECT_EQ(three.partition_on({1}), (Groups{{2}, {3}}));
}

TEST(Grid, NeighboursShareStates) {
  const Grid grid(8, {.shard = 4});
  EXPECT_EQ(grid.partition(Axis::shard), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(grid.partition(Axis::replica), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  const Grid whole(8);
  EXPECT_EQ(whole.size(Axis::shard), 8);
  EXPECT_EQ(whole.size(Axis::replica), 1);
  EXPECT_EQ(whole.partition(Axis::shard), whole.partition(Axis::world));
}

/// Two tensor ranks of two context ranks of two data ranks.
TEST(Grid, ContextRanksShareStates) {
  const Grid grid(8, {.tensor = 2, .context = 2});
  EXPECT_EQ(grid.partition(Axis::tensor), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(grid.partition(Axis::context), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(grid.partition(Axis::data), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(grid.partition(Axis::shard), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(grid.partition(Axis::tensor_shard), grid.partition(Axis::world));
  const Grid hybrid(8, {.tensor = 2, .context = 2, .shard = 2});
  EXPECT_EQ(hybrid.partition(Axis::shard), hybrid.partition(Axis::context));
  EXPECT_EQ(hybrid.partition(Axis::replica), hybrid.partition(Axis::data));
  EXPECT_EQ(hybrid.partition(Axis::tensor_shard), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(Grid, CountsTheRanksOfAMachine) {
  for (const Grid& grid :
       {Grid(8), Grid(8, {.shard = 2}), Grid(16, {.tensor = 2, .pipeline = 2, .expert = 2})})
    for (int a = 0; a < axis_count; ++a)
      for (int rank = 0; rank < grid.ranks(); ++rank)
        for (const int each : {1, 2, 4, 8}) {
          const std::vector<int> members = grid.members(static_cast<Axis>(a), rank);
          EXPECT_EQ(
              grid.size_on_machine(static_cast<Axis>(a), rank, each),
              std::count_if(members.begin(), members.end(), [&](int m) { return m / each == rank / each; }));
        }
}

TEST(Grid, KnowsWhichAxesHaveTheSameGroups) {
  for (const Grid& grid :
       {Grid(1), Grid(8), Grid(8, {.shard = 2}), Grid(8, {.shard = 1}), Grid(8, {.tensor = 8}),
        Grid(16, {.tensor = 2, .pipeline = 2, .expert = 2}), Grid(16, {.context = 4, .expert = 4}),
        Grid(8, {.tensor = 2, .context = 2, .shard = 2})})
    for (int a = 0; a < axis_count; ++a)
      for (int b = 0; b < axis_count; ++b) {
        const auto first = static_cast<Axis>(a), second = static_cast<Axis>(b);
        EXPECT_EQ(grid.same_groups(first, second), grid.partition(first) == grid.partition(second))
            << name_of(first) << " and " << name_of(second);
      }
}

TEST(Grid, SizesThatDoAreNamed) {
  const auto error = [](int ranks, const GridSizes& sizes) {
    return error_of(ErrorKind::config, [&] { Grid(ranks, sizes); });
  };
  EXPECT_THAT(error(12, {.tensor = 5}), HasSubstr("parallel.tensor 5 does not divide the 12 ranks"));
  EXPECT_THAT(error(12, {.tensor = 5}), HasSubstr("sizes that do: 1, 2, 3, 4, 6, 12"));
  EXPECT_THAT(error(8, {.pipeline = 16}), HasSubstr("sizes that do: 1, 2, 4, 8"));
  EXPECT_THAT(error(8, {.tensor = 4, .pipeline = 4}),
              HasSubstr("the 2 ranks of a pipeline stage; sizes that do: 1, 2"));
  EXPECT_THAT(error(8, {.tensor = 4, .context = 4}), HasSubstr("parallel.context 4"));
  EXPECT_THAT(
      error(12, {.tensor = 2, .shard = 4}),
      HasSubstr("parallel.shard_size 4 does not divide 6 data-parallel ranks; sizes that do: 1, 2, 3, 6"));
  EXPECT_THAT(error(12, {.context = 3, .shard = 2}),
              HasSubstr("parallel.shard_size 2 is no multiple of parallel.context 3, whose ranks share "
                        "states; sizes that do: 3, 6, 12"));
  EXPECT_THAT(error(12, {.context = 3, .shard = 9}),
              HasSubstr("parallel.shard_size 9 does not divide the 12 ranks of context × data; sizes that "
                        "do: 3, 6, 12"));
  EXPECT_THAT(error(8, {.tensor = 2, .expert = 3}),
              HasSubstr("parallel.expert 3 does not divide the 4 ranks"));
  EXPECT_THAT(error(8, {.expert = 2, .shard = 1}),
              HasSubstr("parallel.shard_size 1 is no multiple of parallel.expert 2, whose ranks have one "
                        "replica's experts together; sizes that do: 2, 4, 8"));
  EXPECT_THAT(error(8, {.expert = 2, .shard = 3}), HasSubstr("data-parallel ranks; sizes that do: 2, 4, 8"));
  EXPECT_THAT(error(12, {.context = 2, .expert = 3, .shard = 2}),
              HasSubstr("parallel.shard_size 2 is no multiple of parallel.expert 3, whose ranks have one "
                        "replica's experts together; sizes that do: 6, 12"));
  EXPECT_THAT(error(8, {.tensor = 0}), HasSubstr("parallel.tensor 0"));
  EXPECT_THAT(error(8, {.shard = -1}), HasSubstr("parallel.shard_size -1"));
  error_of(ErrorKind::usage, [] { Grid(0); });
  error_of(ErrorKind::usage, [] { Grid(4).coordinate(Axis::shard, 4); });
}

}  // namespace
}  // namespace sherd::comm
