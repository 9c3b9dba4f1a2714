// Wherever states live, and however they get there, losses and weights are the same to the bit.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Tier;

/// No parameter stays in host memory.
constexpr const char* all_on_nvme = R"(, "max_in_cpu": 0)";

std::uint64_t held(const RunResult& run, Tier tier) {
  return run.state_bytes[static_cast<int>(tier)];
}

class OffloadEquality : public ::testing::Test {
 protected:
  RunSpec base(int stage, int ranks, const std::string& dtype = "bf16") const {
    RunSpec spec;
    spec.stage = stage, spec.ranks = ranks, spec.dtype = dtype;
    spec.nvme_path = folder_.path();
    return spec;
  }

  sherd::testing::TempFolder folder_;
};

class Placements : public OffloadEquality,
                   public ::testing::WithParamInterface<std::tuple<int, std::string>> {};

TEST_P(Placements, EveryPairGivesTheSameBits) {
  const auto [ranks, dtype] = GetParam();
  RunSpec spec = base(3, ranks, dtype);
  const RunResult plain = train_local(spec);
  EXPECT_EQ(held(plain, Tier::host) + held(plain, Tier::nvme), 0u);
  for (const std::string param : {"none", "cpu", "nvme"})
    for (const std::string optimizer : {"none", "cpu", "nvme"}) {
      if (param == "none" && optimizer == "none") continue;
      spec.offload_param = param, spec.offload_optimizer = optimizer;
      spec.offload_param_extra = param == "nvme" ? all_on_nvme : "";
      const RunResult run = train_local(spec);
      SCOPED_TRACE(cat("offload_param ", param, ", offload_optimizer ", optimizer));
      EXPECT_TRUE(run.bits() == plain.bits());
      EXPECT_LT(held(run, Tier::device), held(plain, Tier::device));
      EXPECT_EQ(held(run, Tier::host) > 0, param == "cpu" || optimizer != "none");
      EXPECT_EQ(held(run, Tier::nvme) > 0, param == "nvme" || optimizer == "nvme");
      EXPECT_EQ(run.io.read > 0, held(run, Tier::nvme) > 0);
      EXPECT_EQ(held(run, Tier::device) + held(run, Tier::host) + held(run, Tier::nvme),
                held(plain, Tier::device));
    }
}

TEST_P(Placements, PersistentParametersAreUpdatedFromNvmeToo) {
  const auto [ranks, dtype] = GetParam();
  RunSpec spec = base(3, ranks, dtype);
  spec.persistence = 100;
  const RunResult plain = train_local(spec);
  EXPECT_GT(plain.persistent, 0);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = all_on_nvme;
  const RunResult run = train_local(spec);
  EXPECT_TRUE(run.bits() == plain.bits());
  EXPECT_GT(held(run, Tier::device), 0u);
  EXPECT_GT(held(run, Tier::nvme), 0u);
}

INSTANTIATE_TEST_SUITE_P(All, Placements,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values("bf16", "fp32")),
                         [](const auto& test) {
                           return cat("ranks", std::get<0>(test.param), "_", std::get<1>(test.param));
                         });

TEST_F(OffloadEquality, EveryStageWithAccumulation) {
  for (const int stage : {1, 2, 3})
    for (const int ranks : {1, 2}) {
      RunSpec spec = base(stage, ranks);
      spec.accumulation = 3;
      const RunResult plain = train_local(spec);
      for (const std::string optimizer : {"cpu", "nvme"}) {
        spec.offload_optimizer = optimizer;
        if (stage == 3) spec.offload_param = optimizer;
        spec.offload_param_extra = optimizer == "nvme" ? all_on_nvme : "";
        const RunResult run = train_local(spec);
        EXPECT_TRUE(run.bits() == plain.bits())
            << "stage " << stage << ", " << ranks << " ranks, " << optimizer;
        EXPECT_GT(held(run, optimizer == "nvme" ? Tier::nvme : Tier::host), 0u);
      }
    }
}

TEST_F(OffloadEquality, ChunksBuffersAndPipelines) {
  RunSpec spec = base(3, 2);
  const RunResult plain = train_local(spec);
  spec.offload_param = spec.offload_optimizer = "nvme";
  std::uint64_t read = 0;
  for (const char* extra : {R"(, "buffer_count": 1)", R"(, "buffer_count": 2, "pipeline_read": true)",
                            R"(, "buffer_count": 3, "pipeline_read": true, "pipeline_write": true)",
                            R"(, "pipeline_read": false, "pipeline_write": false)", R"(, "ratio": 0.5)"})
    for (const long sub_group : {4096L, 1'000'000'000L}) {
      spec.offload_extra = extra;
      spec.sub_group = sub_group;
      spec.offload_param_extra =
          sub_group == 4096 ? R"(, "buffer_count": 1, "max_in_cpu": 0)" : R"(, "max_in_cpu": 9000)";
      const RunResult run = train_local(spec);
      EXPECT_TRUE(run.bits() == plain.bits()) << extra << ", sub_group_size " << sub_group;
      EXPECT_GT(run.io.written, 0u);
      read = std::max(read, run.io.read);
    }
  EXPECT_GT(read, 0u);
}

TEST_F(OffloadEquality, BlocksDepthsAndBackends) {
  RunSpec spec = base(3, 2);
  const RunResult plain = train_local(spec);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = all_on_nvme;
  for (const char* aio :
       {R"("block_size": 4096, "queue_depth": 1)", R"("block_size": 8192, "queue_depth": 64)",
        R"("block_size": 1048576, "queue_depth": 4, "backend": "threads", "thread_count": 2)",
        R"("block_size": 4096, "queue_depth": 3, "checksums": true, "single_submit": true)",
        R"("queue_depth": 5, "overlap_events": false)"}) {
    spec.aio = aio;
    EXPECT_TRUE(train_local(spec).bits() == plain.bits()) << aio;
  }
}

TEST_F(OffloadEquality, ParametersInAFolderOfTheirOwn) {
  for (const bool split : {true, false}) {
    RunSpec spec = base(3, 2);
    spec.split_masters = split;
    const RunResult plain = train_local(spec);
    spec.offload_param = spec.offload_optimizer = "nvme";
    spec.param_nvme_path = folder_.path() / "parameters";
    spec.offload_param_extra = all_on_nvme;
    spec.sub_group = 4096;
    EXPECT_TRUE(train_local(spec).bits() == plain.bits()) << "split masters: " << split;
  }
}

TEST_F(OffloadEquality, PrefetchReuseAndResume) {
  RunSpec spec = base(3, 2);
  spec.tied = false;
  const RunResult plain = train_local(spec);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)";
  spec.prefetch = 30000, spec.max_reuse = 20000, spec.overlap = true, spec.recompute = "full";
  spec.directory = folder_.path() / "checkpoints";
  spec.resume_at = 5;
  const RunResult run = train_local(spec);
  EXPECT_TRUE(run.bits() == plain.bits());
  EXPECT_GT(run.residency.prefetched, 0);
  EXPECT_GT(run.residency.reused, 0);
}

TEST_F(OffloadEquality, SplitMastersAreExact) {
  RunSpec spec = base(2, 2);
  const RunResult split = train_local(spec);
  spec.split_masters = false;
  const RunResult whole = train_local(spec);
  EXPECT_TRUE(split.bits() == whole.bits());
  EXPECT_LT(held(split, Tier::device), held(whole, Tier::device));
}

TEST_F(OffloadEquality, SixteenBitMomentsDoNotDependOnWhereTheyLive) {
  RunSpec spec = base(3, 2);
  const RunResult fp32 = train_local(spec);
  spec.moments = "bf16";
  const RunResult plain = train_local(spec);
  EXPECT_FALSE(plain.bits() == fp32.bits());
  EXPECT_NEAR(plain.losses.back(), fp32.losses.back(), 0.05);
  spec.offload_optimizer = "nvme";
  spec.sub_group = 4096;
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
}

TEST_F(OffloadEquality, HalfPrecisionWithItsLossScale) {
  RunSpec spec = base(3, 2, "fp16");
  spec.loss_scale_window = 1, spec.steps = 30;  // doubles until gradients overflow
  const RunResult plain = train_local(spec);
  EXPECT_GT(plain.skipped, 0);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = all_on_nvme;
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
}

TEST_F(OffloadEquality, ACheckpointMovesBetweenPlacements) {
  RunSpec spec = base(3, 2);
  const RunResult plain = train_local(spec);
  spec.directory = folder_.path() / "moved";
  RunSpec first = spec, second = spec;
  first.offload_param = first.offload_optimizer = "nvme";
  first.offload_param_extra = all_on_nvme;
  first.steps = 6;
  RunResult end;
  launch_ranks(2, [&](DistributedPtr dist) {
    const auto run = [&](const RunSpec& part, int from, bool load) {
      auto engine = make_engine(dist, part);
      if (load) engine->load_checkpoint(spec.directory);
      for (int step = from; step < part.steps; ++step)
        engine->train_batch(
            [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, dist->rank(), 0); });
      if (!load) engine->save_checkpoint(spec.directory);
      RunResult out;
      collect_weights(*engine, out);
      return out;
    };
    run(first, 0, false);
    RunResult out = run(second, 6, true);
    if (dist->rank() == 0) end = std::move(out);
  });
  EXPECT_TRUE(end.masters == plain.masters);
  EXPECT_TRUE(end.parameters == plain.parameters);
}

TEST_F(OffloadEquality, TrainsOnADeviceTenTimesSmallerThanItsStates) {
  for (const int ranks : {1, 2}) {
    RunSpec spec = base(3, ranks);
    spec.hidden = 64, spec.layers = 24, spec.steps = 4, spec.recompute = "full";
    spec.bucket = 10000;  // elements whose gradients wait on the device until they travel
    const RunResult plain = train_local(spec);
    spec.device_limit = static_cast<long>(held(plain, Tier::device) / 10);
    try {
      train_local(spec);
      ADD_FAILURE() << "nothing enforced the limit";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::memory) << error.what();
    }
    spec.cpu_checkpointing = true;
    for (const std::string tier : {"cpu", "nvme"}) {
      spec.offload_param = spec.offload_optimizer = tier;
      spec.offload_param_extra = tier == "nvme" ? all_on_nvme : "";
      const RunResult small = train_local(spec);
      EXPECT_TRUE(small.bits() == plain.bits()) << tier << ", " << ranks << " ranks";
      EXPECT_LE(small.device_peak, static_cast<std::uint64_t>(spec.device_limit));
      EXPECT_GT(small.device_peak, 0u);
    }
  }
}

TEST_F(OffloadEquality, BoundCoresChangeNothing) {
  RunSpec spec = base(3, 1);
  const RunResult plain = train_local(spec);
  spec.bind_cores = true;
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
  spec.threads = available_cores() + 1;
  try {
    train_local(spec);
    FAIL() << "there are not as many cores";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
  }
}

TEST_F(OffloadEquality, CheckpointsInTheHostTierChangeNothing) {
  RunSpec spec = base(3, 2);
  spec.recompute = "full", spec.layers = 24, spec.steps = 3;
  const RunResult plain = train_local(spec);
  spec.cpu_checkpointing = true;
  const RunResult moved = train_local(spec);
  EXPECT_TRUE(moved.bits() == plain.bits());
  EXPECT_LT(moved.activation_peak, plain.activation_peak);
}

TEST_F(OffloadEquality, AFlippedBitIsSeen) {
  RunSpec spec = base(3, 2);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = all_on_nvme;
  const RunResult plain = train_local(spec);
  spec.nudge_step = spec.steps - 1;
  EXPECT_FALSE(train_local(spec).bits() == plain.bits());
}

}  // namespace
}  // namespace sherd::test
