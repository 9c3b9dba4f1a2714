#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "comm/dry/dry_world.h"

namespace sherd::comm {
namespace {

using device::Category;

TEST(DryWorld, CountsTrafficAndMovesNothing) {
  const auto device = device::make_meta_device(1);
  const auto group = make_dry_world(2, 4);
  EXPECT_EQ(group->rank(), 2);
  EXPECT_EQ(group->size(), 4);
  const device::Storage window = group->allocate(*device, 4000, Category::communication, device::Tier::host);
  EXPECT_EQ(device->ledger().current(device::Tier::host, Category::communication), 4000u);
  const Tensor full = Tensor::view_of(window, 0, {1000}, DType::f32), shard = full.range(500, 750);
  CallOptions async;
  async.async = true;
  Work gathered = group->all_gather({{shard, full}}, async);
  EXPECT_TRUE(gathered.done());
  gathered.wait();
  group->reduce_scatter({{full, shard, 0, 250, shard}}, DType::f32).wait();
  const double loss = 3;
  Tensor x = Tensor::of<double>(*device, {1}, std::span(&loss, 1));
  CallOptions scalar;
  scalar.scalar = true;
  group->all_reduce(x, ReduceOp::sum, 0.25, scalar).wait();
  EXPECT_EQ(*x.data<double>(), 3);
  group->send(shard, 0).wait();
  group->receive(shard, 1, async).wait();
  group->barrier();
  EXPECT_EQ(group->traffic().all_gather, 3000u);
  EXPECT_EQ(group->traffic().reduce_scatter, 3000u);
  EXPECT_EQ(group->traffic().p2p, 1000u);
  EXPECT_GT(group->traffic().scalars, 0u);
}

TEST(DryWorld, HasParts) {
  const auto device = device::make_meta_device(1);
  const auto world = make_dry_world(5, 8);
  const auto half = world->part({{0, 2, 4, 6}, {7, 5, 3, 1}});
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(half->rank(), 1);
  EXPECT_EQ(half->size(), 4);
  EXPECT_EQ(half->name(), "dry(4 of 8: ranks 7, 5, 3, 1)");
  const auto pair = half->part({{3, 1}});
  EXPECT_EQ(pair->rank(), 1);
  EXPECT_EQ(pair->name(), "dry(2 of 8: ranks 1, 5)");
  EXPECT_EQ(half->part({{0, 2}, {3}}), nullptr);
  const Tensor x = Tensor::empty(*device, {100}, DType::f32);
  half->all_gather({{x.range(25, 50), x}});
  EXPECT_EQ(half->traffic().all_gather, 300u);
  EXPECT_EQ(world->traffic().all_gather, 0u);
  EXPECT_EQ(world->traffic().scalars, 0u);
  EXPECT_THROW(world->part({{0, 1}, {1, 2}}), Error);
  EXPECT_THROW(world->part({{0, 8}}), Error);
}

TEST(DryWorld, ChecksCallsAndKnowsNoSplit) {
  const auto device = device::make_meta_device(1);
  const auto group = make_dry_world(0, 2);
  const Tensor x = Tensor::empty(*device, {3}, DType::f32);
  EXPECT_THROW(group->all_gather({{x, x}}), Error);
  EXPECT_THROW(group->send(x, 0), Error);
  EXPECT_THROW(make_dry_world(2, 2), Error);
  EXPECT_THROW(group->split(0, 0), Error);
}

}  // namespace
}  // namespace sherd::comm
