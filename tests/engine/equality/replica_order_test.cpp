// Replicas exchange gradients in small buckets while backward runs, whatever else their ranks wait for:
// stages of a pipeline, tables that several stages use, experts of which some have no tokens. Nobody waits
// for ever, and the bits are those of one bucket for all (tests/sharding/turns_test.cpp: of any layout).
#include <gtest/gtest.h>

#include "sharding/parallel/experts/moe.h"
#include "support/equality.h"
#include "support/full_suite.h"

namespace sherd::test {
namespace {

RunSpec spec_of(int pipeline, int replicas, int stage) {
  RunSpec spec;
  spec.pipeline = pipeline;
  spec.ranks = pipeline * replicas;
  spec.shard_size = 1;
  spec.stage = stage;
  spec.steps = 2;
  spec.layers = 2 * pipeline;
  spec.accumulation = 2 * pipeline;
  spec.overlap = true;
  spec.bucket = 2304;
  return spec;
}

std::string replica_name(const RunSpec& spec) {
  return cat(spec.ranks, " ranks, pipeline ", spec.pipeline, ", shard_size ", spec.shard_size, ", stage ",
             spec.stage, ", ", spec.schedule, spec.tied ? ", tied" : "", ", bucket ", spec.bucket,
             spec.overlap ? ", overlap" : "");
}

/// The same layout with all gradients in one bucket, behind backward.
RunResult in_one_bucket(RunSpec spec) {
  spec.bucket = 500'000'000, spec.overlap = false;
  return train_local(spec);
}

/// `expected`: of in_one_bucket().
void expect_replica_bits(const RunSpec& spec, const RunResult& expected) {
  const RunResult got = train_local(spec);
  EXPECT_TRUE(got.bits() == expected.bits()) << replica_name(spec);
  EXPECT_EQ(got.reducer.overlapped > 0, spec.overlap) << replica_name(spec);
  EXPECT_GT(got.reducer.buckets, expected.reducer.buckets) << replica_name(spec);
}

constexpr std::string_view replica_schedules[] = {"gpipe", "1f1b", "interleaved", "zero_bubble"};

class ReplicaOrder : public ::testing::TestWithParam<std::string_view> {
 protected:
  static RunSpec scheduled(RunSpec spec) {
    spec.schedule = GetParam();
    if (spec.schedule == "interleaved") spec.virtual_stages = 2;
    return spec;
  }
};

TEST_P(ReplicaOrder, OfTwoStages) {
  for (const bool tied : {false, true})
    for (const int stage : {0, 1, 2, 3}) {
      if (!to_run({4, 2, 4}, {place_of(GetParam(), replica_schedules), tied, stage})) continue;
      RunSpec spec = scheduled(spec_of(2, 2, stage));
      spec.tied = tied;
      const RunResult expected = in_one_bucket(spec);
      expect_replica_bits(spec, expected);
      spec.bucket = 1, spec.overlap = stage % 2 == 0;
      expect_replica_bits(spec, expected);
    }
}

TEST_P(ReplicaOrder, OfEightRanks) {
  for (const auto& [pipeline, replicas, shard_size] : {std::tuple{2, 4, 1}, {4, 2, 1}, {2, 4, 2}}) {
    RunSpec spec = scheduled(spec_of(pipeline, replicas, pipeline == 2 ? 3 : 1));
    spec.shard_size = shard_size;
    expect_replica_bits(spec, in_one_bucket(spec));
  }
}

TEST_P(ReplicaOrder, NativeReductionAgreesToRounding) {
  RunSpec spec = scheduled(spec_of(2, 2, 3));
  spec.dtype = "fp32";
  const RunResult expected = train_local(spec);
  spec.reduction = "native";
  const RunResult got = train_local(spec);
  for (std::size_t step = 0; step < expected.losses.size(); ++step)
    EXPECT_NEAR(got.losses[step], expected.losses[step], 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Of, ReplicaOrder, ::testing::ValuesIn(replica_schedules),
                         [](const auto& test) { return cat("schedule_", test.param); });

/// In each layer all tokens take one expert, and nearly all of a replica's one more: some experts have tokens
/// in one replica alone, in some micro-batches, or not at all.
RunSpec starving(int replicas, int expert, int stage) {
  RunSpec spec = spec_of(1, 2 * replicas, stage);
  spec.shard_size = 2;
  spec.expert = expert;
  spec.steps = 3;
  spec.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 48, "router": "sigmoid", "bias_update": 1e-3)";
  spec.between_steps = [](Engine& engine) {
    std::size_t first = 0;
    const auto replica = static_cast<std::size_t>(engine.data_ranks().rank() / 2);
    for (const auto& [path, layer] : parallel::layers_of_experts(engine.module())) {
      std::vector<float> bias(4);
      bias[first % 4] = 1, bias[(first + 1 + 2 * (replica % 2)) % 4] = 0.1F;
      layer->restore(bias);
      ++first;
    }
  };
  return spec;
}

class StarvedExperts : public ::testing::TestWithParam<int> {};

TEST_P(StarvedExperts, OfReplicasHoldNobodyUp) {
  for (const char* schedule : {"accumulate", "layered"}) {
    RunSpec spec = starving(2, 2, GetParam());
    spec.schedule = schedule;
    const RunResult expected = in_one_bucket(spec);
    for (const bool overlap : {false, true})
      for (const long bucket : {spec_of(1, 4, 0).bucket, 1L}) {
        if (!to_run({4, 2, 2, 2}, {GetParam(), spec.schedule == "layered", overlap, bucket == 1})) continue;
        spec.overlap = overlap, spec.bucket = bucket;
        expect_replica_bits(spec, expected);
      }
  }
}

TEST_P(StarvedExperts, InAPipelineOfReplicas) {
  for (const char* schedule : {"1f1b", "zero_bubble"}) {
    RunSpec spec = starving(2, 2, GetParam());
    spec.layers = 4, spec.ranks = 8, spec.pipeline = 2, spec.schedule = schedule;
    expect_replica_bits(spec, in_one_bucket(spec));
  }
}

/// Without accumulation replicas have the bits of full sharding, whoever has the experts.
TEST(StarvedExpertsOf, ReplicasHaveTheBitsOfFullSharding) {
  const auto without_accumulation = [](int shard_size, int expert) {
    RunSpec spec = starving(2, expert, 3);
    spec.accumulation = 1, spec.shard_size = shard_size, spec.accumulate_in = "fp32";
    return spec;
  };
  const RunResult expected = train_local(without_accumulation(4, 1));
  for (const int expert : {1, 2})
    EXPECT_TRUE(train_local(without_accumulation(2, expert)).bits() == expected.bits()) << expert;
}

INSTANTIATE_TEST_SUITE_P(Of, StarvedExperts, ::testing::Values(0, 1, 2, 3),
                         [](const auto& test) { return cat("zero_stage_", test.param); });

}  // namespace
}  // namespace sherd::test
