// 1-bit Adam: replicas that exchange compressed momentum. The same bits over tiers and restarts, weights that
// all replicas have alike (train_local() compares them), and what travels. What is computed is judged by
// one_bit_oracle_test.cpp.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

/// Two replicas of two ranks each, which freeze after 4 of 10 steps.
RunSpec two_by_two(int stage) {
  RunSpec spec;
  spec.stage = stage, spec.ranks = 4, spec.shard_size = 2, spec.steps = 10, spec.layers = 2;
  spec.optimizer =
      R"("type": "OneBitAdam", "params": {"lr": 0.003, "weight_decay": 0.1, "freeze_step": 4, "eps": 1e-4})";
  return spec;
}

TEST(OneBitAdam, StagesAndTiersGiveTheSameBits) {
  const TempFolder folder;
  const RunResult expected = train_local(two_by_two(1));
  ASSERT_NE(expected.losses.back(), expected.losses.front());
  for (const int stage : {1, 2, 3})
    for (const std::string tier : {"none", "cpu", "nvme"}) {
      RunSpec spec = two_by_two(stage);
      spec.offload_optimizer = tier, spec.nvme_path = folder.path().string(), spec.sub_group = 4096;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << stage << ", " << tier;
      spec.threads = 2, spec.bucket = 2000, spec.overlap = true;
      if (stage == 3) spec.offload_param = tier;
      RunSpec threads = two_by_two(1);
      threads.threads = 2;
      EXPECT_TRUE(train_local(spec).bits() == train_local(threads).bits())
          << "stage " << stage << ", " << tier;
    }
}

TEST(OneBitAdam, EachRankMayBeAReplica) {
  const TempFolder folder;
  RunSpec spec = two_by_two(0);
  spec.shard_size = 0;  // which is 1 then
  const RunResult expected = train_local(spec);
  spec.shard_size = 1;
  for (const int stage : {0, 1, 2, 3})
    for (const std::string tier : {"none", "nvme"}) {
      if (stage == 0 && tier != "none") continue;
      spec.stage = stage, spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << stage << ", " << tier;
    }
}

TEST(OneBitAdam, ResumesToTheBitBeforeAndAfterItFreezes) {
  for (const int shard_size : {1, 2})
    for (const int step : {3, 4, 7}) {
      const TempFolder folder;
      RunSpec spec = two_by_two(2);
      spec.shard_size = shard_size;
      const RunResult whole = train_local(spec);
      spec.directory = folder.path().string(), spec.resume_at = step;
      EXPECT_TRUE(train_local(spec).bits() == whole.bits()) << "after step " << step;
    }
}

TEST(OneBitAdam, EveryPrecisionScheduleAndLayout) {
  const TempFolder folder;
  for (const std::string dtype : {"fp32", "fp16"}) {
    RunSpec spec = two_by_two(2);
    spec.dtype = dtype, spec.accumulation = 2;
    const RunResult expected = train_local(spec);
    spec.stage = 3, spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << dtype;
    spec.offload_param = "nvme", spec.schedule = "layered", spec.recompute = "full", spec.tied = false;
    RunSpec untied = two_by_two(2);
    untied.dtype = dtype, untied.accumulation = 2, untied.tied = false;
    EXPECT_TRUE(train_local(spec).bits() == train_local(untied).bits()) << dtype << ", layered";
  }
  RunSpec tensor = two_by_two(2);
  tensor.shard_size = 1, tensor.tensor = 2;
  const RunResult expected = train_local(tensor);
  tensor.stage = 3, tensor.offload_optimizer = "cpu";
  EXPECT_TRUE(train_local(tensor).bits() == expected.bits());
  RunSpec stages = two_by_two(2);
  stages.shard_size = 1, stages.pipeline = 2;  // a table that both stages hold is reduced exactly
  const RunResult two = train_local(stages);
  stages.stage = 3, stages.offload_optimizer = "nvme", stages.nvme_path = folder.path().string();
  EXPECT_TRUE(train_local(stages).bits() == two.bits());
}

}  // namespace
}  // namespace sherd::test
