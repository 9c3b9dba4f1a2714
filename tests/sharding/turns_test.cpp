// The order of what replicas exchange: turns by hand, and all ranks of many layouts, which never wait for
// each other in a ring.
#include "sharding/gradients/turns.h"

#include <gtest/gtest.h>

#include "tests/sharding/replica_simulation.h"

namespace sherd::sharding {
namespace {

using config::Schedule;
using Op = Turn::Op;
using Fault = ReplicaCase::Fault;

/// Less than the smallest part, parts of them, and all.
constexpr std::int64_t buckets[] = {1, 7, 1000};

ReplicaCase case_of(Schedule schedule, int stages, int chunks) {
  ReplicaCase what{.schedule = schedule, .stages = stages, .chunks = chunks, .micro_batches = stages};
  if (stages == 1) what.micro_batches = 2;
  what.shards = stages <= 2 ? 2 : 1;
  return what;
}

std::vector<ReplicaCase> pipelines() {
  std::vector<ReplicaCase> out{case_of(Schedule::accumulate, 1, 1), case_of(Schedule::layered, 1, 3)};
  for (int stages = 1; stages <= 8; ++stages) {
    for (const Schedule schedule :
         {Schedule::gpipe, Schedule::one_forward_one_backward, Schedule::zero_bubble})
      out.push_back(case_of(schedule, stages, 1));
    out.push_back(case_of(Schedule::interleaved, stages, stages <= 4 ? 3 : 2));
  }
  return out;
}

TEST(Turns, OfTwoReplicas) {
  Turns first({2, 0, true, true}), second({2, 1, true, true});
  using List = std::vector<Turn>;
  EXPECT_EQ(first.launch(), (List{{Op::issue, 0}}));
  EXPECT_EQ(second.launch(), List{});
  EXPECT_EQ(first.launch(), (List{{Op::issue, 1}, {Op::pass_on, 0}}));
  EXPECT_EQ(second.launch(), (List{{Op::issue, 0}}));
  first.launch();
  EXPECT_EQ(second.launch(), (List{{Op::issue, 1}, {Op::pass_on, 0}, {Op::pass_back, 0}, {Op::settle, 0}}));
  EXPECT_EQ(first.launch(), (List{{Op::issue, 3}, {Op::pass_on, 2}, {Op::pass_back, 0}, {Op::settle, 0}}));
  EXPECT_EQ(first.drain().size(), 1 + 3u + 3u);
  EXPECT_EQ(first.drain(), List{});
  EXPECT_EQ(first.launch(), (List{{Op::issue, 4}}));
}

class ReplicaOrder : public ::testing::TestWithParam<int> {};

TEST_P(ReplicaOrder, NobodyWaitsForEverInAPipeline) {
  for (ReplicaCase what : pipelines())
    for (const std::int64_t bucket : buckets)
      for (int i = 0; i < 8; ++i) {
        what.replicas = GetParam(), what.bucket = bucket;
        what.overlap = i % 2 == 1, what.tied = i / 2 % 2 == 1, what.folds = i / 4 == 1;
        what.gathers = !what.folds && bucket == 7;
        EXPECT_EQ(ReplicaSimulation(what).run(), "") << what.text();
      }
}

/// Experts that nobody has tokens for, others in each micro-batch, layer and rank.
TEST_P(ReplicaOrder, NobodyWaitsForEverForExpertsWithoutTokens) {
  for (ReplicaCase what : {case_of(Schedule::accumulate, 1, 1), case_of(Schedule::layered, 1, 3),
                           case_of(Schedule::one_forward_one_backward, 2, 1),
                           case_of(Schedule::zero_bubble, 2, 1), case_of(Schedule::interleaved, 2, 2)})
    for (const auto& [shards, experts] : {std::pair{2, 1}, {2, 2}, {4, 2}})
      for (const std::int64_t bucket : buckets)
        for (int i = 0; i < 8; ++i) {
          what.replicas = GetParam(), what.bucket = bucket, what.shards = shards, what.experts = experts;
          what.overlap = i % 2 == 1, what.tied = i / 2 % 2 == 1, what.folds = i / 4 == 1;
          what.gathers = !what.folds;
          what.router = static_cast<std::uint64_t>(1 + i);
          EXPECT_EQ(ReplicaSimulation(what).run(), "") << what.text();
        }
}

INSTANTIATE_TEST_SUITE_P(Of, ReplicaOrder, ::testing::Values(1, 2, 3, 4),
                         [](const auto& test) { return cat(test.param, "_replicas"); });

/// Each rule broken: the simulation sees it.
TEST(ReplicaOrderOf, FaultsAreFound) {
  ReplicaCase tied = case_of(Schedule::one_forward_one_backward, 2, 1);
  tied.tied = true;
  ReplicaCase chunks = case_of(Schedule::interleaved, 2, 2);
  ReplicaCase experts = case_of(Schedule::accumulate, 1, 1);
  experts.experts = 2, experts.router = 3, experts.folds = false, experts.gathers = true;
  const auto with = [](ReplicaCase what, Fault fault) {
    what.fault = fault;
    return ReplicaSimulation(what).run();
  };
  EXPECT_NE(with(tied, Fault::tied_in_backward), "");
  EXPECT_NE(with(chunks, Fault::lags_swapped), "");
  EXPECT_NE(with(experts, Fault::experts_among_dense), "");
  EXPECT_NE(with(experts, Fault::no_tokens_no_turn), "");
  for (const ReplicaCase& what : {tied, chunks, experts}) EXPECT_EQ(with(what, Fault::none), "");
}

}  // namespace
}  // namespace sherd::sharding
