// Hybrid sharding: states sharded inside groups of parallel.shard_size ranks, replicas that agree once per
// step.
#include <gtest/gtest.h>

#include <cmath>

#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

RunSpec spec_of(const std::string& dtype, int stage, int shard_size, int accumulation = 1) {
  RunSpec spec;
  spec.ranks = 4;
  spec.dtype = dtype;
  spec.stage = stage;
  spec.shard_size = shard_size;
  spec.accumulation = accumulation;
  spec.steps = 8;
  return spec;
}

class Hybrid : public ::testing::TestWithParam<std::string> {};

TEST_P(Hybrid, EqualsFullShardingWithoutAccumulation) {
  const auto expected = train_local(spec_of(GetParam(), 3, 4));
  for (const int shard_size : {1, 2})
    for (const int stage : {0, 1, 2, 3})
      for (const bool overlap : {false, true}) {
        if (!to_run({2, 2, 4, 2}, {GetParam() == "bf16", shard_size - 1, stage, overlap})) continue;
        RunSpec spec = spec_of(GetParam(), stage, shard_size);
        spec.overlap = overlap;
        spec.bucket = overlap ? 700 : 500'000'000;
        const auto got = train_local(spec);
        EXPECT_TRUE(got.bits() == expected.bits())
            << "stage " << stage << ", shard_size " << shard_size << (overlap ? ", overlapped" : "");
        if (overlap) {
          EXPECT_GT(got.reducer.buckets, spec.steps);
        }
      }
}

TEST_P(Hybrid, EqualsItselfOverStagesTiersAndBucketsWithAccumulation) {
  const auto expected = train_local(spec_of(GetParam(), 2, 2, 3));
  const TempFolder folder;
  for (const char* tier : {"none", "cpu", "nvme"}) {
    RunSpec spec = spec_of(GetParam(), 3, 2, 3);
    spec.offload_param = spec.offload_optimizer = tier;
    spec.nvme_path = folder.path().string();
    spec.bucket = 900;
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << tier;
  }
  RunSpec resumed = spec_of(GetParam(), 3, 2, 3);
  const TempFolder saved;
  resumed.directory = saved.path().string();
  resumed.resume_at = 3;
  EXPECT_TRUE(train_local(resumed).bits() == expected.bits());
}

TEST_P(Hybrid, AgreesWithFullShardingToRoundingWithAccumulation) {
  const auto full = train_local(spec_of(GetParam(), 3, 4, 3));
  const auto hybrid = train_local(spec_of(GetParam(), 3, 2, 3));
  EXPECT_FALSE(hybrid.bits() == full.bits()) << "the order of sums is another";
  const double tolerance = GetParam() == "fp32" ? 2e-5 : 2e-2;
  for (std::size_t step = 0; step < full.losses.size(); ++step) {
    EXPECT_NEAR(hybrid.losses[step], full.losses[step], tolerance);
    EXPECT_NEAR(hybrid.norms[step] / full.norms[step], 1, 5 * tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Local, Hybrid, ::testing::Values("fp32", "bf16"),
                         [](const auto& test) { return test.param; });

TEST(HybridOf, StatesAreShardedInsideTheGroupOnly) {
  const auto quarter = train_local(spec_of("fp32", 3, 4)), half = train_local(spec_of("fp32", 3, 2));
  const auto device = static_cast<std::size_t>(device::Tier::device);
  const double ratio =
      static_cast<double>(half.state_bytes[device]) / static_cast<double>(quarter.state_bytes[device]);
  EXPECT_NEAR(ratio, 2, 0.1);
}

/// Replicas are some buckets apart while backward runs, and make the same collectives all the same.
TEST(HybridOf, UpdatesThatBeginInBackwardAreThoseOfFullSharding) {
  const auto spec_with = [](int shard_size) {
    RunSpec spec = spec_of("bf16", 2, shard_size);
    spec.offload_optimizer = "cpu";
    spec.clipping = 0, spec.check_overflow = false;
    spec.bucket = 900;
    return spec;
  };
  const auto expected = train_local(spec_with(4));
  EXPECT_GT(expected.early_updates.back(), 0);
  for (const int shard_size : {1, 2})
    for (const bool overlap : {false, true}) {
      RunSpec spec = spec_with(shard_size);
      spec.overlap = overlap;
      const auto got = train_local(spec);
      EXPECT_TRUE(got.bits() == expected.bits())
          << "shard_size " << shard_size << (overlap ? ", overlapped" : "");
    }
}

TEST(HybridOf, NativeReductionAgreesToRounding) {
  for (const auto& [dtype, shard_size] : {std::pair{"fp32", 2}, {"fp32", 1}, {"bf16", 1}}) {
    RunSpec spec = spec_of(dtype, 2, shard_size, 4);
    spec.accumulate_in = "fp32";
    const auto ordered = train_local(spec);
    spec.reduction = "native";
    const auto native = train_local(spec);
    const double tolerance = spec.dtype == "fp32" ? 2e-5 : 2e-3;
    for (std::size_t step = 0; step < ordered.losses.size(); ++step) {
      EXPECT_NEAR(native.losses[step], ordered.losses[step], tolerance) << dtype << " " << shard_size;
      EXPECT_NEAR(native.norms[step] / ordered.norms[step], 1, tolerance) << dtype << " " << shard_size;
    }
  }
}

}  // namespace
}  // namespace sherd::test
