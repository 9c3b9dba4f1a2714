#include "comm/process_groups.h"
#include "comm/dry/dry_world.h"

#include <gtest/gtest.h>

#include "tests/comm/conformance.h"

namespace sherd::comm {
namespace {

using conformance::error_of;

constexpr std::array<Axis, axis_count> axes{Axis::tensor,       Axis::context,  Axis::shard, Axis::replica,
                                            Axis::tensor_shard, Axis::pipeline, Axis::data,  Axis::expert,
                                            Axis::expert_data,  Axis::world};

/// World ranks of the group, in its order.
std::vector<int> gathered(Communicator& group, int world_rank) {
  const auto device = device::make_cpu_device(1);
  const std::int32_t mine = world_rank;
  const Tensor x = Tensor::of<std::int32_t>(*device, {1}, std::span(&mine, 1));
  const Tensor all = Tensor::empty(*device, {group.size()}, DType::i32);
  group.all_gather({{x, all}});
  return {all.data<std::int32_t>(), all.data<std::int32_t>() + group.size()};
}

TEST(ProcessGroups, AreTheGridsGroups) {
  for (const GridSizes& sizes : {GridSizes{},
                                 {.shard = 4},
                                 {.tensor = 2, .shard = 2},
                                 {.tensor = 2, .pipeline = 2},
                                 {.tensor = 2, .context = 2, .expert = 4},
                                 {.tensor = 2, .context = 2, .shard = 2},
                                 {.shard = 1}})
    run_local(8, CommOptions{}, [&](Communicator& world) {
      const ProcessGroups groups(world, Grid(8, sizes));
      EXPECT_EQ(&groups.world(), &world);
      for (const Axis axis : axes) {
        Communicator& group = groups.group(axis);
        EXPECT_EQ(gathered(group, world.rank()), groups.grid().members(axis, world.rank())) << name_of(axis);
        EXPECT_EQ(group.rank(), groups.grid().coordinate(axis, world.rank()));
        for (const Axis other : axes)
          EXPECT_EQ(&group == &groups.group(other),
                    groups.grid().partition(axis) == groups.grid().partition(other))
              << name_of(axis) << " and " << name_of(other)
              << ": ranks that are the same have one communicator";
      }
    });
}

TEST(ProcessGroups, OfStagesAreMadeOnce) {
  const Grid grid(8, {.pipeline = 4});
  run_local(8, CommOptions{}, [&](Communicator& world) {
    ProcessGroups groups(world, grid);
    Communicator* ends = groups.replicas_on({0, 3});
    EXPECT_EQ(groups.replicas_on({0, 3}), ends);
    Communicator* middle = groups.replicas_on({1, 2});
    const bool outer = world.rank() < 2 || world.rank() >= 6;
    EXPECT_EQ(ends != nullptr, outer);
    EXPECT_EQ(middle != nullptr, !outer);
    Communicator& own = outer ? *ends : *middle;
    EXPECT_EQ(gathered(own, world.rank()),
              outer ? grid.replicas_on({0, 3}, world.rank()) : grid.replicas_on({1, 2}, world.rank()));
    // 4 bytes to the other rank, told under the pipeline, whose own group has carried nothing.
    for (const auto& [axis, traffic] : groups.traffic())
      EXPECT_EQ(traffic.all_gather, axis == Axis::pipeline ? 4u : 0u) << name_of(axis);
  });
  // Where peers are absent, a rank looks at those of its own groups alone.
  const auto world = make_dry_world(5, 8);
  ProcessGroups dry(*world, grid, false);
  EXPECT_EQ(dry.replicas_on({0, 3}), nullptr);
  ASSERT_NE(dry.replicas_on({0, 2}), nullptr);
  EXPECT_EQ(dry.replicas_on({0, 2})->size(), 2);
  EXPECT_EQ(dry.replicas_on({0, 2})->rank(), 1);
}

TEST(ProcessGroups, OfOneRankNobodyHears) {
  run_local(2, CommOptions{.timeout_seconds = 20}, [](Communicator& world) {
    const auto device = device::make_cpu_device(1);
    if (world.rank() == 0) {  // the other does not take part
      const auto alone = world.part({{0}, {1}});
      ASSERT_NE(alone, nullptr);
      EXPECT_EQ(alone->size(), 1);
      const Tensor x = Tensor::zeros(*device, {10}, DType::f32),
                   sum = Tensor::zeros(*device, {10}, DType::f32);
      x.data<float>()[3] = 1.0f + 1.0f / 512;
      sum.data<float>()[3] = 2;
      alone->reduce_scatter({{x, sum, 0, 10, sum}}, DType::bf16).wait();
      EXPECT_EQ(sum.data<float>()[3], 3) << "rounded alone, added to what was there";
    }
    EXPECT_EQ(world.part({}), nullptr);
    world.barrier();
  });
}

TEST(ProcessGroups, CountTrafficByAxisOnce) {
  const Grid grid(8, {.tensor = 2, .shard = 2});
  const auto world = make_dry_world(5, 8);
  ProcessGroups groups(*world, grid);
  const auto device = device::make_meta_device(1);
  const Tensor x = Tensor::empty(*device, {100}, DType::f32);
  const auto gather = [&](Axis axis) {
    Communicator& group = groups.group(axis);
    const std::int64_t n = 8, first = group.rank() * n;
    group.all_gather({{x.range(first, first + n), x.range(0, n * group.size())}});
  };
  gather(Axis::shard), gather(Axis::shard), gather(Axis::data), gather(Axis::pipeline);
  std::vector<std::pair<std::string, std::uint64_t>> told;
  for (const auto& [axis, traffic] : groups.traffic()) told.emplace_back(name_of(axis), traffic.all_gather);
  // Data and experts' data are the same ranks; pipeline, context and expert have one.
  EXPECT_EQ(
      told,
      (std::vector<std::pair<std::string, std::uint64_t>>{
          {"tensor", 0}, {"shard", 64}, {"replica", 0}, {"tensor_shard", 0}, {"data", 96}, {"world", 0}}));
  groups.reset_traffic();
  for (const auto& [axis, traffic] : groups.traffic()) EXPECT_EQ(traffic.all_gather, 0u) << name_of(axis);

  ProcessGroups pure(*world, Grid(8));
  pure.group(Axis::shard).all_gather({{x.range(50, 60), x.range(0, 80)}});
  ASSERT_EQ(pure.traffic().size(), 1u);
  EXPECT_EQ(pure.traffic()[0].axis, Axis::shard);
  EXPECT_EQ(pure.traffic()[0].traffic.all_gather, 280u);
}

TEST(ProcessGroups, RefuseAnothersGrid) {
  const auto world = make_dry_world(0, 4);
  error_of(ErrorKind::usage, [&] { ProcessGroups(*world, Grid(8)); });
}

}  // namespace
}  // namespace sherd::comm
